//! The library object: one context, one completion queue, and the objects by their ids.

use crate::dispatch::Dispatcher;
use crate::instance::{Instance, PORT};
use crate::transfer::{MAX_OUTSTANDING, Status, Transfers};
use crate::{Buffer, Endpoint, Error, Id};
use farlane_rdma_client::{Channel, Context, Cq, Pd, devices};
use farlane_sys::sync::lock;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The library, initialised. Dropping it ends its dispatcher thread; buffers and endpoints stay
/// usable until they are dropped themselves.
#[derive(Debug)]
pub struct Library {
    dispatcher: Mutex<Option<Dispatcher>>,
    instance: Arc<Instance>,
}

impl Library {
    /// Initialises the library on the device of that name, or on the first one there is.
    ///
    /// # Errors
    /// When there is no such device, or it refuses.
    pub fn open(device: Option<&str>) -> Result<Self, Error> {
        let devices = devices();
        let device = match device {
            None => devices.first().ok_or(Error::NoDevice)?,
            Some(name) => devices
                .iter()
                .find(|device| device.name() == name)
                .ok_or_else(|| Error::UnknownDevice(name.into()))?,
        };
        let context = Context::open(device)?;
        let port = context.port_attributes(PORT.into())?;
        let gid = context.gid(PORT.into(), 0)?.raw;
        let channel = Channel::create(&context)?;
        // The dispatcher polls the descriptor together with others, so reading must not block.
        set_nonblocking(&channel).map_err(|error| Error::System(error.into()))?;
        Ok(Self {
            dispatcher: Mutex::new(None),
            instance: Arc::new(Instance {
                transfers: Transfers::default(),
                queue: Cq::create(&context, MAX_OUTSTANDING, Some(&channel))?,
                channel,
                pd: Pd::allocate(&context)?,
                context,
                gid,
                mtu: port.active_mtu,
                ids: 1.into(),
                objects: Mutex::default(),
            }),
        })
    }

    /// Allocates a buffer of `length` bytes, zeroed: in host memory, or in this process's own
    /// where the device has no window.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn allocate(&self, length: usize) -> Result<Arc<Buffer>, Error> {
        Buffer::allocate(&self.instance, length)
    }

    /// Makes an endpoint, to be connected to one of a peer.
    ///
    /// # Errors
    /// `ENOMEM` where the device has no queue pair left, `ENODEV` where it is gone.
    pub fn create_endpoint(&self) -> Result<Arc<Endpoint>, Error> {
        Endpoint::create(&self.instance)
    }

    /// The buffer with this id, if there is one.
    #[must_use]
    pub fn buffer(&self, id: Id) -> Option<Arc<Buffer>> {
        self.instance.objects().buffers.get(&id)?.upgrade()
    }

    /// The endpoint with this id, if there is one.
    #[must_use]
    pub fn endpoint(&self, id: Id) -> Option<Arc<Endpoint>> {
        self.instance.objects().endpoints.get(&id)?.upgrade()
    }

    /// How a transfer stands. The answer that it has finished is given once, then its id is
    /// forgotten. A transfer with a callback is pending until the callback's turn has come.
    ///
    /// # Errors
    /// [`Error::UnknownTransfer`] for an id that no transfer has, or that was forgotten.
    pub fn query(&self, transfer: Id) -> Result<Status, Error> {
        self.instance.transfers.progress(&self.instance.queue);
        self.instance.transfers.query(transfer)
    }

    /// Runs the callbacks of transfers that have finished, here and now; waits for one for up to
    /// `timeout` (`None`: as long as it takes) if there is none. Returns how many it ran.
    ///
    /// # Errors
    /// `ENODEV` when the device is gone and no callback is left.
    pub fn dispatch(&self, timeout: Option<Duration>) -> Result<usize, Error> {
        self.instance.dispatch(timeout, None)
    }

    /// Starts a thread that runs callbacks until the library is dropped or
    /// [`stop_dispatcher`](Self::stop_dispatcher). Does nothing if it runs already.
    ///
    /// # Errors
    /// When the system has no thread to give.
    pub fn start_dispatcher(&self) -> Result<(), Error> {
        let mut dispatcher = self.dispatcher();
        if dispatcher.is_none() {
            *dispatcher = Some(Dispatcher::start(&self.instance)?);
        }
        Ok(())
    }

    /// Ends the thread that [`start_dispatcher`](Self::start_dispatcher) started. When this
    /// returns, no callback runs in it, unless this is called from one.
    pub fn stop_dispatcher(&self) {
        let dispatcher = self.dispatcher().take();
        drop(dispatcher);
    }

    fn dispatcher(&self) -> MutexGuard<'_, Option<Dispatcher>> {
        lock(&self.dispatcher)
    }
}

fn set_nonblocking(channel: &Channel) -> rustix::io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(channel.fd())?;
    rustix::fs::fcntl_setfl(channel.fd(), flags | rustix::fs::OFlags::NONBLOCK)
}
