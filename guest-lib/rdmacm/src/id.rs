//! Ids: how they are made, moved from channel to channel, and destroyed.

use crate::channel::{self, Local};
use crate::device::Device;
use crate::errno::{answer, called};
use crate::sys::*;
use crate::{address, event, queue_pair};
use farlane_abi::Errno;
use farlane_abi::rdma::CmMigrate;
use farlane_sys::sync::{held, lock};
use farlane_verbs_sys::*;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// The address of an id in a table. It is only followed while the id is in that table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address(pub *mut rdma_cm_id);

// SAFETY: an address alone gives no access; ids are usable from any thread.
unsafe impl Send for Address {}

/// Something that the backend knows: the device, and its handle there.
#[derive(Clone)]
pub struct Remote {
    pub device: Arc<Device>,
    pub handle: u32,
}

/// What a program has set.
#[derive(Clone, Copy, Default)]
pub struct Options {
    pub traffic_class: u8,
    pub shares_port: bool,
    /// Local ack timeout, where it is not the usual one.
    pub ack_timeout: Option<u8>,
}

/// A multicast group that was joined.
#[derive(Clone, Copy)]
pub struct Group {
    pub number: u64,
    pub address: SocketAddr,
    pub gid: address::Gid,
    /// What the program says of it.
    pub context: usize,
    pub is_attached: bool,
}

/// The state of an id.
#[derive(Default)]
pub struct Inner {
    pub device: Option<Arc<Device>>,
    /// What it has bound, on one device or on all.
    pub bound: Vec<Remote>,
    pub connection: Option<Remote>,
    /// It has a channel of its own, and waits there for what comes of calls.
    pub is_sync: bool,
    pub options: Options,
    /// Events that the program has and has not acknowledged.
    unacknowledged: usize,
    /// Its connection failed here, whatever the peer says of it.
    pub has_failed: bool,
    /// Its connection is over, or there was none.
    pub has_ended: bool,
    /// Reads and atomic operations that its peer has asked for: to be taken, and begun.
    pub resources: Option<(u8, u8)>,
    /// Private data that an address brought with it.
    pub connect_data: Vec<u8>,
    /// Of queue pairs of connections that an endpoint is asked for.
    pub qp_init: Option<QpInit>,
    pub groups: Vec<Group>,
    /// Groups that were ever joined.
    pub joined: u64,
}

/// How an endpoint's queue pairs are made.
#[derive(Clone, Copy)]
pub struct QpInit(pub ibv_qp_init_attr);

// SAFETY: pointers to objects of libibverbs, which are usable from any thread.
unsafe impl Send for QpInit {}

/// An id, with the state of this library behind it.
#[repr(C)]
pub struct Id {
    c: UnsafeCell<rdma_cm_id>,
    inner: Mutex<Inner>,
    acknowledged: Condvar,
}

/// The state behind an id.
pub unsafe fn of<'a>(id: *mut rdma_cm_id) -> &'a Id {
    // SAFETY: by the caller's contract this library has made it.
    unsafe { &*id.cast::<Id>() }
}

impl Id {
    pub fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// The program gets an event of it.
    pub fn hand_out(&self) {
        self.inner().unacknowledged += 1;
    }

    /// Events of it that the program has.
    #[cfg(test)]
    pub fn unacknowledged(&self) -> usize {
        self.inner().unacknowledged
    }

    /// The program has acknowledged one.
    pub fn acknowledge(&self) {
        let mut inner = self.inner();
        inner.unacknowledged = inner.unacknowledged.saturating_sub(1);
        self.acknowledged.notify_all();
    }

    fn wait_acknowledged(&self) {
        let mut inner = self.inner();
        while inner.unacknowledged > 0 {
            inner = held(self.acknowledged.wait(inner));
        }
    }

    /// Its connection.
    pub fn connection(&self) -> Result<Remote, Errno> {
        self.inner().connection.clone().ok_or(Errno::EINVAL)
    }
}

/// Makes an id.
pub fn make(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<*mut rdma_cm_id, Errno> {
    let is_sync = channel.is_null();
    let channel = if is_sync { channel::make()? } else { channel };
    let c = rdma_cm_id {
        verbs: null_mut(),
        channel,
        context,
        qp: null_mut(),
        route: rdma_route {
            addr: address::none(),
            path_rec: null_mut(),
            num_paths: 0,
        },
        ps,
        port_num: 0,
        event: null_mut(),
        send_cq_channel: null_mut(),
        send_cq: null_mut(),
        recv_cq_channel: null_mut(),
        recv_cq: null_mut(),
        srq: null_mut(),
        pd: null_mut(),
        qp_type,
    };
    let inner = Inner {
        is_sync,
        ..Inner::default()
    };
    let id = Id {
        c: UnsafeCell::new(c),
        inner: Mutex::new(inner),
        acknowledged: Condvar::new(),
    };
    Ok(Box::into_raw(Box::new(id)).cast())
}

/// `rdma_create_id`.
pub unsafe fn create(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    let qp_type = match ps {
        RDMA_PS_TCP | RDMA_PS_IB => IBV_QPT_RC,
        RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
        _ => return answer(Err(Errno::EINVAL)),
    };
    answer(make(channel, context, ps, qp_type).map(|made| {
        // SAFETY: by the caller's contract there is room for it.
        unsafe { id.write(made) };
    }))
}

/// Binds an id to a device, whose end its channel is told of from then on.
pub unsafe fn settle(id: *mut rdma_cm_id, device: &Arc<Device>) -> Result<(), Errno> {
    let pd = device.pd()?;
    // SAFETY: by the caller's contract.
    unsafe {
        channel::of_id(id)?.index(device)?;
        (*id).verbs = device.verbs();
        (*id).port_num = 1;
        if (*id).pd.is_null() {
            (*id).pd = pd;
        }
        of(id).inner().device = Some(Arc::clone(device));
    }
    device.add(id);
    Ok(())
}

/// Tells of an event that this library has made.
pub unsafe fn tell(
    id: *mut rdma_cm_id,
    kind: rdma_cm_event_type,
    status: i32,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    let channel = unsafe { channel::of_id(id)? };
    channel.tell(Local {
        id: Address(id),
        kind,
        status,
        group: None,
    });
    Ok(())
}

/// Of an id with a channel of its own: waits for what comes of a call.
pub unsafe fn complete(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's contract; the event is the id's own.
    unsafe {
        if !of(id).inner().is_sync {
            return Ok(());
        }
        acknowledge_own(id);
        (*id).event = event::next((*id).channel)?;
        let (kind, status) = ((*(*id).event).event, (*(*id).event).status);
        match (kind, status) {
            (RDMA_CM_EVENT_DEVICE_REMOVAL, _) => Err(Errno::ENODEV),
            (_, 0) => Ok(()),
            (RDMA_CM_EVENT_REJECTED, _) => Err(crate::errno::number(libc::ECONNREFUSED)),
            (_, status) => Err(crate::errno::number(status.saturating_abs())),
        }
    }
}

/// Acknowledges the event that an id with a channel of its own has.
pub unsafe fn acknowledge_own(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's contract; the event is the id's own.
    unsafe {
        if !(*id).event.is_null() {
            event::acknowledge((*id).event);
            (*id).event = null_mut();
        }
    }
}

fn count(events: u32) -> usize {
    usize::try_from(events).unwrap_or(usize::MAX)
}

/// `rdma_destroy_id`.
pub unsafe fn destroy(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { of(id) };
    let (device, remotes, is_sync) = {
        let mut inner = state.inner();
        let connection = inner.connection.take();
        let remotes: Vec<_> = connection
            .into_iter()
            .chain(inner.bound.drain(..))
            .collect();
        (inner.device.take(), remotes, inner.is_sync)
    };
    // Nobody finds it any more from then on.
    for remote in &remotes {
        remote.device.ids().by_handle.remove(&remote.handle);
    }
    if let Some(device) = device {
        device.ids().all.remove(&Address(id));
    }
    // SAFETY: by the caller's contract; what the id has is its own. An id has a channel.
    unsafe {
        channel::of((*id).channel).take_away(|| {
            let mut events = channel::of((*id).channel).take_those_of(id).len();
            for remote in &remotes {
                let verbs = remote.device.context().verbs();
                // Fails only where the device is gone, and all with it.
                let waited = verbs.cm_destroy(&remote.handle.into());
                events += waited.map_or(0, |waited| count(waited.get()));
            }
            ((), events)
        });
        acknowledge_own(id);
        state.wait_acknowledged();
        if is_sync {
            channel::destroy((*id).channel);
        }
        queue_pair::destroy_completion_queues(id);
        if !(*id).route.path_rec.is_null() {
            drop(Box::from_raw((*id).route.path_rec));
        }
        drop(Box::from_raw(id.cast::<Id>()));
    }
    0
}

/// `rdma_migrate_id`.
pub unsafe fn migrate(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    // SAFETY: by the caller's contract.
    answer(unsafe { migrate_to(id, channel) })
}

/// Moves an id to another channel, or one of its own.
pub unsafe fn migrate_to(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> Result<(), Errno> {
    // SAFETY: by the caller's contract.
    unsafe {
        let state = of(id);
        let was_sync = state.inner().is_sync;
        let is_sync = channel.is_null();
        if was_sync && is_sync {
            return Err(Errno::EINVAL);
        }
        let to = if is_sync { channel::make()? } else { channel };
        let from = (*id).channel;
        let moved = channel::of(from).take_away(|| {
            let mut events = 0;
            let moved = move_remotes(state, to, &mut events);
            if moved.is_ok() {
                let local = channel::of(from).take_those_of(id);
                events += local.len();
                for event in local {
                    channel::of(to).tell(event);
                }
            }
            (moved, events)
        });
        if let Err(errno) = moved {
            if is_sync {
                channel::destroy(to);
            }
            return Err(errno);
        }
        if was_sync {
            acknowledge_own(id);
            channel::destroy(from);
        }
        (*id).channel = to;
        state.inner().is_sync = is_sync;
        // Who takes events at the channel before has done with the id.
        state.wait_acknowledged();
        Ok(())
    }
}

/// Has events of what an id has in backends come to another channel. Counts those that waited.
unsafe fn move_remotes(
    state: &Id,
    to: *mut rdma_event_channel,
    events: &mut usize,
) -> Result<(), Errno> {
    let (device, remotes): (_, Vec<Remote>) = {
        let inner = state.inner();
        let remotes = inner.connection.iter().chain(&inner.bound);
        (inner.device.clone(), remotes.cloned().collect())
    };
    if let Some(device) = device {
        // SAFETY: as below.
        match unsafe { channel::of(to) }.index(&device) {
            // Its end is told where it is known.
            Ok(_) | Err(Errno::ENODEV) => {}
            Err(errno) => return Err(errno),
        }
    }
    for remote in remotes {
        // SAFETY: by the caller's contract.
        let event = unsafe { channel::of(to) }.index(&remote.device)?;
        let migrate = CmMigrate {
            id: remote.handle.into(),
            event: event.into(),
        };
        let waited = called(remote.device.context().verbs().cm_migrate(&migrate))?;
        *events += count(waited.get());
    }
    Ok(())
}

/// `rdma_set_option`.
pub unsafe fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: by the caller's contract there are so many bytes.
    let result = unsafe {
        let byte = || (length == 1).then(|| value.cast::<u8>().read());
        let number = || (length == 4).then(|| value.cast::<c_int>().read_unaligned());
        let state = of(id);
        let mut inner = state.inner();
        match (level, option) {
            (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS) => {
                byte().map(|class| inner.options.traffic_class = class)
            }
            (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT) => byte()
                .filter(|timeout| *timeout < 32)
                .map(|timeout| inner.options.ack_timeout = Some(timeout)),
            (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR) => {
                number().map(|shares| inner.options.shares_port = shares != 0)
            }
            // What listens at all addresses does so for both families, or is bound to one.
            (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY) => number().map(drop),
            _ => return answer(Err(Errno::ENOSYS)),
        }
    };
    answer(result.ok_or(Errno::EINVAL))
}

/// `rdma_get_src_port`.
pub unsafe fn source_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by the caller's contract.
    unsafe { port((&raw const (*id).route.addr.src).cast()) }
}

/// `rdma_get_dst_port`.
pub unsafe fn destination_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by the caller's contract.
    unsafe { port((&raw const (*id).route.addr.dst).cast()) }
}

unsafe fn port(address: *const libc::sockaddr) -> u16 {
    // SAFETY: by the caller's contract.
    let address = unsafe { address::read(address) };
    address.map_or(0, |address| address.port().to_be())
}
