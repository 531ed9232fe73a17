//! A context without a library's care: the call ring by hand, and objects made by bare calls.

use crate::Failure;
use farlane_abi::Errno;
use farlane_abi::arena::{
    BACKEND_SLEEPING, CALL_PAYLOAD_BYTES, CALL_SLOT_BYTES, CALL_SLOTS, CallHeader,
    HEADER_SEGMENT_BYTES, OFF_BACKEND_STATE, OFF_CALL_COMPLETED, OFF_CALL_RING, OFF_CALL_SUBMITTED,
    OFF_DEAD, OFF_RUNG, OFF_RUNG_SUMMARY,
};
use farlane_abi::calls::Caller;
use farlane_abi::queue::{CQ_OFF_CONSUMED, CQ_OFF_ENTRIES, CQ_OFF_PRODUCED, Completion, CqLayout};
use farlane_abi::rdma::{
    CreateCq, MR_SOURCE_PIN, Mr, RegMr, VerbsStubs, VerbsVersion, VersionRange,
};
use farlane_abi::width::to_usize;
use farlane_transport::{DeviceInfo, Map, PinKind, Transport};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// How long the backend may take for an answer: this machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Words of rung queue pairs that are set at each post: more than it has queue pairs at a time.
const RUNG: usize = 8;

/// A context.
#[derive(Debug)]
pub struct Session {
    transport: Arc<dyn Transport>,
    header: Arc<Map>,
    /// Region of the header.
    pub header_region: u32,
    submitted: Cell<u32>,
    version: VerbsVersion,
}

impl Session {
    /// Opens a context.
    ///
    /// # Errors
    /// What the transport says.
    pub fn open(device: &DeviceInfo) -> Result<Self, Failure> {
        let transport = farlane_transport::open(device)?;
        let (header_region, header) =
            transport.attach_segment(usize::try_from(HEADER_SEGMENT_BYTES)?)?;
        Ok(Self {
            transport,
            header,
            header_region,
            submitted: Cell::new(0),
            version: VerbsVersion::V1,
        })
    }

    /// Opens a context of the newest version of queues and calls.
    ///
    /// # Errors
    /// What the transport and the backend say.
    pub fn open_newest(device: &DeviceInfo) -> Result<Self, Failure> {
        let mut session = Self::open(device)?;
        let number = VerbsStubs(&session).negotiate(&VersionRange::ours())?;
        session.version = VerbsVersion::from_wire(number.get()).ok_or("A strange version")?;
        Ok(session)
    }

    /// The version of its queues and calls.
    pub fn version(&self) -> VerbsVersion {
        self.version
    }

    /// The transport.
    pub fn transport(&self) -> &Arc<dyn Transport> {
        &self.transport
    }

    /// The header's memory.
    pub fn header(&self) -> &Map {
        &self.header
    }

    /// Whether the backend has cut the context off.
    pub fn is_cut_off(&self) -> bool {
        self.header.word(OFF_DEAD).load(Ordering::Acquire) != 0
    }

    /// Rings its queue pairs, and wakes a backend that sleeps.
    pub fn wake(&self) {
        for word in 0..RUNG {
            let rung = self.header.word(OFF_RUNG + 4 * word);
            rung.fetch_or(u32::MAX, Ordering::SeqCst);
        }
        let summary = self.header.word(OFF_RUNG_SUMMARY);
        summary.fetch_or((1 << RUNG) - 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let state = self.header.word(OFF_BACKEND_STATE);
        if state.load(Ordering::Relaxed) == BACKEND_SLEEPING {
            self.transport.doorbell();
        }
    }

    /// Waits for something.
    ///
    /// # Errors
    /// `ETIMEDOUT` when it does not come.
    pub fn wait(&self, mut done: impl FnMut() -> bool) -> Result<(), Errno> {
        let start = Instant::now();
        while !done() {
            if start.elapsed() > PATIENCE {
                return Err(Errno::ETIMEDOUT);
            }
            self.transport.wait(Duration::from_millis(1));
        }
        Ok(())
    }

    /// A call with `args`, of which the slot says that they are `length` bytes. Returns the
    /// result's bytes.
    ///
    /// # Errors
    /// The backend's answer; `ETIMEDOUT` without one, `ENODEV` when cut off.
    pub fn raw_call(&self, number: u32, args: &[u8], length: u32) -> Result<Vec<u8>, Errno> {
        let slot = to_usize(u64::from(self.submitted.get() % CALL_SLOTS));
        let head = OFF_CALL_RING + slot * CALL_SLOT_BYTES;
        let payload = head + size_of::<CallHeader>();
        let request = CallHeader {
            number: number.into(),
            length: length.into(),
            ..CallHeader::default()
        };
        // SAFETY: this process has one thread.
        unsafe {
            self.header.write(head, &request);
            let fits = args.len().min(CALL_PAYLOAD_BYTES);
            self.header.write_bytes(payload, &args[..fits]);
        }
        let submitted = self.submitted.get().wrapping_add(1);
        self.submitted.set(submitted);
        let word = self.header.word(OFF_CALL_SUBMITTED);
        word.store(submitted, Ordering::Release);
        self.wake();
        let completed = self.header.word(OFF_CALL_COMPLETED);
        let answered = || completed.load(Ordering::Acquire) == submitted;
        let mut spins = 0;
        while !answered() && spins < 2000 {
            spins += 1;
            std::hint::spin_loop();
        }
        self.wait(|| answered() || self.is_cut_off())?;
        if !answered() {
            return Err(Errno::ENODEV);
        }
        // SAFETY: as above.
        let answer: CallHeader = unsafe { self.header.read(head) };
        if let Some(errno) = Errno::from_wire(answer.status.get()) {
            return Err(errno);
        }
        let length = to_usize(u64::from(answer.length.get()));
        let mut result = vec![0; length.min(CALL_PAYLOAD_BYTES)];
        // SAFETY: as above.
        unsafe { self.header.read_bytes(payload, &mut result) };
        Ok(result)
    }

    /// A segment: its region and its memory.
    ///
    /// # Errors
    /// What the transport says.
    pub fn segment(&self, length: u64) -> Result<(u32, Arc<Map>), Failure> {
        Ok(self.transport.attach_segment(usize::try_from(length)?)?)
    }

    /// Pins memory.
    ///
    /// # Errors
    /// What the transport says.
    pub fn pin(&self, memory: &Map, writable: bool) -> Result<u32, Failure> {
        let address = memory.base().addr().get();
        // SAFETY: only as many transfers go there as this program starts, and it ends them before
        // the mapping; where an attack fails at that, whatever the kernel has put there since is
        // this program's own.
        Ok(unsafe {
            self.transport
                .attach_pin(PinKind::Memory, address, memory.len(), writable)?
        })
    }

    /// Registers a pin from its first byte on, at its own address.
    ///
    /// # Errors
    /// What the backend says.
    pub fn register(&self, pd: u32, pin: u32, memory: &Map, access: u32) -> Result<Mr, Errno> {
        let address = memory.base().addr().get() as u64;
        VerbsStubs(self).reg_mr(&RegMr {
            pd: pd.into(),
            source: MR_SOURCE_PIN.into(),
            object: pin.into(),
            access: access.into(),
            offset: 0.into(),
            length: (memory.len() as u64).into(),
            iova: address.into(),
        })
    }
}

impl Caller for &Session {
    type Error = Errno;

    fn call(&self, number: u32, args: &[u8], result: &mut [u8]) -> Result<usize, Errno> {
        let length = u32::try_from(args.len()).map_err(|_| Errno::EINVAL)?;
        let bytes = self.raw_call(number, args, length)?;
        let room = result.get_mut(..bytes.len()).ok_or(Errno::EPROTO)?;
        room.copy_from_slice(&bytes);
        Ok(bytes.len())
    }
}

/// A completion queue by hand.
#[derive(Debug)]
pub struct Queue {
    /// Its handle.
    pub handle: u32,
    /// Its region.
    pub region: u32,
    /// Its memory.
    pub map: Arc<Map>,
    layout: CqLayout,
    taken: Cell<u32>,
}

impl Queue {
    /// Creates one.
    ///
    /// # Errors
    /// What transport and backend say.
    pub fn create(session: &Session, entries: u32) -> Result<Self, Failure> {
        let layout = CqLayout::new(entries).ok_or("Too many entries")?;
        let (region, map) = session.segment(layout.segment_bytes())?;
        let handle = VerbsStubs(session).create_cq(&CreateCq {
            region: region.into(),
            offset: 0.into(),
            entries: entries.into(),
            event: 0.into(),
        })?;
        Ok(Self {
            handle: handle.get(),
            region,
            map,
            layout,
            taken: Cell::new(0),
        })
    }

    /// Takes a completion if there is one.
    pub fn take(&self) -> Option<Completion> {
        let taken = self.taken.get();
        if self.map.word(CQ_OFF_PRODUCED).load(Ordering::Acquire) == taken {
            return None;
        }
        let index = to_usize(u64::from(taken & (self.layout.entries - 1)));
        // SAFETY: this process has one thread.
        let completion = unsafe {
            self.map
                .read(CQ_OFF_ENTRIES + index * size_of::<Completion>())
        };
        self.taken.set(taken.wrapping_add(1));
        let consumed = self.map.word(CQ_OFF_CONSUMED);
        consumed.store(self.taken.get(), Ordering::Release);
        Some(completion)
    }

    /// Waits for the next completion and returns its status.
    ///
    /// # Errors
    /// `ETIMEDOUT` when none comes.
    pub fn next_status(&self, session: &Session) -> Result<u8, Errno> {
        let mut found = None;
        session.wait(|| {
            found = self.take();
            found.is_some()
        })?;
        found.map(|c| c.status).ok_or(Errno::ETIMEDOUT)
    }
}
