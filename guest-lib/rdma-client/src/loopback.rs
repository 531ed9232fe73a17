//! A transport whose backend is a thread of the test: the guest's side of the shared memory is
//! tested
//! against a second, independent reading of `farlane_abi`.

use crate::Context;
use crate::arena::Part;
use farlane_abi::Errno;
use farlane_abi::arena::{
    BACKEND_SLEEPING, CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader,
    OFF_BACKEND_STATE, OFF_CALL_COMPLETED, OFF_CALL_RING, OFF_CALL_SUBMITTED, OFF_CALLER_WAITING,
    OFF_DEAD,
};
use farlane_abi::zerocopy::FromBytes;
use farlane_sys::sync::lock;
use farlane_transport::{
    Address, DeviceInfo, Map, PinKind, Transport, TransportError, TransportInfo,
};
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Answers a call: (number, arguments) to a status and result bytes.
pub(crate) type Answer = Box<dyn FnMut(u32, &[u8]) -> Result<Vec<u8>, Errno> + Send>;

/// What the transport and the test's backend share.
#[derive(Default)]
pub(crate) struct Loopback {
    /// Segments by region; 0 is the header.
    segments: Mutex<Vec<Arc<Map>>>,
    /// Regions that are pins: address and length.
    pub(crate) pins: Mutex<BTreeMap<u32, (usize, usize)>>,
    events: Mutex<BTreeMap<u32, OwnedFd>>,
    wakes: Mutex<u32>,
    woken: Condvar,
    doorbell: Mutex<bool>,
    rung: Condvar,
    pub(crate) doorbells: AtomicU32,
    pub(crate) sleeps: AtomicU32,
    next_pin: AtomicU32,
    stop: AtomicBool,
}

impl std::fmt::Debug for Loopback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Loopback")
    }
}

impl Loopback {
    pub(crate) fn segment(&self, region: u32) -> Arc<Map> {
        Arc::clone(&lock(&self.segments)[region as usize])
    }

    /// Raises event `index`, or wakes a caller for index 0.
    pub(crate) fn raise(&self, index: u32) {
        if index == 0 {
            *lock(&self.wakes) += 1;
            self.woken.notify_all();
        } else if let Some(fd) = lock(&self.events).get(&index) {
            rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// Does what kernel or watcher do when the backend dies.
    pub(crate) fn die(&self) {
        self.segment(0).word(OFF_DEAD).store(1, Ordering::Release);
        self.raise(0);
        for fd in lock(&self.events).values() {
            rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    /// Takes the next call and answers it; `false` when there is none.
    pub(crate) fn serve(&self, answer: &mut Answer) -> bool {
        let header = self.segment(0);
        let completed = header.word(OFF_CALL_COMPLETED).load(Ordering::Relaxed);
        if header.word(OFF_CALL_SUBMITTED).load(Ordering::Acquire) == completed {
            return false;
        }
        let at = OFF_CALL_RING + (completed % CALL_SLOTS) as usize * CALL_SLOT_BYTES;
        let payload = at + size_of::<CallHeader>();
        // SAFETY: submitted and not completed: the slot is the backend's.
        let mut call: CallHeader = unsafe { header.read(at) };
        let mut args = vec![0; call.length.get() as usize];
        // SAFETY: as above.
        unsafe { header.read_bytes(payload, &mut args) };
        match answer(call.number.get(), &args) {
            Ok(result) => {
                // More than a slot holds: a backend that lies about the length.
                let fits = &result[..result.len().min(CALL_PAYLOAD_BYTES)];
                call.length = u32::try_from(result.len()).unwrap().into();
                // SAFETY: as above.
                unsafe { header.write_bytes(payload, fits) };
            }
            Err(errno) => call.status = errno.to_wire().into(),
        }
        // SAFETY: as above.
        unsafe { header.write(at, &call) };
        header
            .word(OFF_CALL_COMPLETED)
            .store(completed.wrapping_add(1), Ordering::Release);
        fence(Ordering::SeqCst);
        if header.word(OFF_CALLER_WAITING).load(Ordering::Relaxed) != 0 {
            self.raise(0);
        }
        true
    }

    /// Says that the backend sleeps, and sleeps until the doorbell unless `ready`.
    fn sleep(&self, ready: impl Fn() -> bool) {
        let state = self.segment(0);
        let state = state.word(OFF_BACKEND_STATE);
        state.store(BACKEND_SLEEPING, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let mut rung = lock(&self.doorbell);
        while !*rung && !ready() && !self.stop.load(Ordering::Relaxed) {
            rung = self.rung.wait(rung).unwrap();
        }
        *rung = false;
        state.store(0, Ordering::Relaxed);
    }
}

impl Transport for Loopback {
    fn info(&self) -> TransportInfo {
        TransportInfo::default()
    }

    fn attach_segment(&self, length: usize) -> Result<(u32, Arc<Map>), TransportError> {
        let map = Arc::new(Map::anonymous(length)?);
        let mut segments = lock(&self.segments);
        segments.push(Arc::clone(&map));
        Ok((u32::try_from(segments.len() - 1).unwrap(), map))
    }

    unsafe fn attach_pin(
        &self,
        _kind: PinKind,
        address: usize,
        length: usize,
        _writable: bool,
    ) -> Result<u32, TransportError> {
        let region = 1000 + self.next_pin.fetch_add(1, Ordering::Relaxed);
        lock(&self.pins).insert(region, (address, length));
        Ok(region)
    }

    fn detach(&self, region: u32) -> Result<(), TransportError> {
        lock(&self.pins).remove(&region);
        Ok(())
    }

    fn map_buffer(&self, _: u32, _: u64, length: usize) -> Result<Map, TransportError> {
        Map::anonymous(length)
    }

    fn unmap_buffer(&self, _: u32, _: u64, _: usize) -> Result<(), TransportError> {
        Ok(())
    }

    fn bind_event(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), TransportError> {
        lock(&self.events).insert(index, fd.try_clone_to_owned().unwrap());
        Ok(())
    }

    fn unbind_event(&self, index: u32) -> Result<(), TransportError> {
        lock(&self.events).remove(&index);
        Ok(())
    }

    fn doorbell(&self) {
        self.doorbells.fetch_add(1, Ordering::Relaxed);
        *lock(&self.doorbell) = true;
        self.rung.notify_all();
    }

    fn wait(&self, timeout: Duration) {
        self.sleeps.fetch_add(1, Ordering::Relaxed);
        let wakes = lock(&self.wakes);
        let (mut wakes, _) = self
            .woken
            .wait_timeout_while(wakes, timeout, |wakes| *wakes == 0)
            .unwrap();
        *wakes = 0;
    }

    fn is_dead(&self) -> bool {
        false
    }
}

/// A context over a loopback whose calls a thread answers.
pub(crate) struct Rig {
    pub(crate) context: Arc<Context>,
    pub(crate) transport: Arc<Loopback>,
    backend: Option<JoinHandle<()>>,
}

impl Rig {
    /// `sleepy` backends sleep whenever they have nothing to do; others spin.
    pub(crate) fn new(sleepy: bool, mut answer: Answer) -> Self {
        let transport = Arc::new(Loopback::default());
        let info = DeviceInfo {
            number: 0,
            address: Address::Socket("loopback".into()),
        };
        let context = Context::over(info, Arc::clone(&transport) as Arc<dyn Transport>).unwrap();
        let backend = std::thread::spawn({
            let transport = Arc::clone(&transport);
            move || {
                let header = transport.segment(0);
                let ready = || {
                    header.word(OFF_CALL_SUBMITTED).load(Ordering::Acquire)
                        != header.word(OFF_CALL_COMPLETED).load(Ordering::Relaxed)
                };
                while !transport.stop.load(Ordering::Relaxed) {
                    if !transport.serve(&mut answer) {
                        if sleepy {
                            transport.sleep(ready);
                        } else {
                            std::thread::yield_now();
                        }
                    }
                }
            }
        });
        Self {
            context,
            transport,
            backend: Some(backend),
        }
    }

    /// A backend that answers every call with zeros, but for handles: each is 1.
    pub(crate) fn agreeable() -> Self {
        Self::new(false, Box::new(|number, _| Ok(agreeable(number))))
    }

    /// The same of a backend that knows the calls up to this one, and answers the question for a
    /// version with that number.
    pub(crate) fn of_version(last_call: u32, version: u32) -> Self {
        let answer = move |number, _: &[u8]| match number {
            17 if last_call >= 17 => Ok(version.to_le_bytes().to_vec()),
            _ if number <= last_call => Ok(agreeable(number)),
            _ => Err(Errno::ENOSYS),
        };
        Self::new(false, Box::new(answer))
    }

    /// Ends the backend's thread, so that the test itself plays the backend from now on. Calls,
    /// destruction included, then find a dead device.
    pub(crate) fn take_over(&mut self) {
        self.transport.stop.store(true, Ordering::Relaxed);
        self.transport.doorbell();
        if let Some(backend) = self.backend.take() {
            backend.join().unwrap();
        }
        self.transport.stop.store(false, Ordering::Relaxed);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.take_over();
        self.transport.die();
    }
}

/// Zeros, but for handles: each is 1.
pub(crate) fn agreeable(number: u32) -> Vec<u8> {
    let mut result = vec![0; result_bytes(number)];
    if matches!(number, 5 | 7 | 9 | 11 | 15 | 19 | 25 | 29 | 36 | 38) {
        result[0] = 1;
    }
    result
}

/// Length of a call's result.
fn result_bytes(number: u32) -> usize {
    use farlane_abi::rdma;
    match number {
        2 => size_of::<rdma::DeviceAttr>(),
        3 => size_of::<rdma::PortAttr>(),
        4 => size_of::<rdma::Gid>(),
        5 | 9 | 29 | 36 => size_of::<rdma::Handle>(),
        37 => size_of::<rdma::DeviceTime>(),
        7 | 38 => size_of::<rdma::Mr>(),
        11 | 19 => size_of::<rdma::Qp>(),
        13 => size_of::<rdma::QpAttr>(),
        15 => size_of::<rdma::Buffer>(),
        18 => size_of::<rdma::DeviceLimits>(),
        25 => size_of::<rdma::Srq>(),
        27 => size_of::<rdma::SrqAttr>(),
        34 | 35 => 4,
        _ => 0,
    }
}

/// A value in a queue, as the backend reads it.
pub(crate) fn read<T: FromBytes>(part: &Part, offset: usize) -> T {
    // SAFETY: the tests read what has been published.
    unsafe { part.read(offset) }
}
