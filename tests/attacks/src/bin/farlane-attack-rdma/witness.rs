//! The victim in the same VM: memory with a known pattern, everything registered with every right,
//! and traffic of its own. It tells the attacker all that it has.

use crate::Failure;
use crate::pair::{ALL, Pair, own_gid};
use crate::session::Session;
use farlane_abi::queue::WC_STATUS_SUCCESS;
use farlane_abi::rdma::{AllocBuffer, VerbsStubs};
use farlane_transport::{Map, devices};
use std::path::Path;
use std::time::Duration;

/// Bytes of memory that it watches, of either kind.
pub const BYTES: usize = 1 << 20;

/// What its memory holds, up to its end.
pub const PATTERN: &[u8; 16] = b"do not touch me!";

/// Pause between two looks.
pub const PAUSE: Duration = Duration::from_millis(50);

/// What the attacker knows of the witness.
#[derive(Debug)]
pub struct Known {
    /// Address of its memory.
    pub address: u64,
    /// Length of its memory in bytes.
    pub length: u64,
    /// Handle of its protection domain.
    pub pd: u32,
    /// Handle and key of its memory.
    pub mr: u32,
    /// Handle of its completion queue.
    pub cq: u32,
    /// Handle of its queue pair.
    pub qp: u32,
    /// Number of its queue pair.
    pub qp_number: u32,
    /// GID of its port.
    pub gid: [u8; 16],
    /// Where in the window its buffer is; of a device of the kernel, what its queue is mapped by.
    pub buffer_offset: u64,
    /// Its largest region; of a device of the kernel, the handle of its memory.
    pub last_region: u32,
}

impl Known {
    /// Reads what a witness has written.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(path)?;
        let mut numbers = text.split_whitespace().map(str::parse::<u64>);
        let mut next = || {
            numbers
                .next()
                .ok_or("The witness says too little")?
                .map_err(Failure::from)
        };
        Ok(Self {
            address: next()?,
            length: next()?,
            pd: next()?.try_into()?,
            mr: next()?.try_into()?,
            cq: next()?.try_into()?,
            qp: next()?.try_into()?,
            qp_number: next()?.try_into()?,
            gid: ((u128::from(next()?) << 64) | u128::from(next()?)).to_be_bytes(),
            buffer_offset: next()?,
            last_region: next()?.try_into()?,
        })
    }

    /// Writes it, whole or not at all.
    pub fn write(&self, path: &Path) -> Result<(), Failure> {
        let (high, low) = self.gid.split_at(8);
        let half = |bytes: &[u8]| {
            bytes
                .iter()
                .fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
        };
        let numbers = [
            self.address,
            self.length,
            self.pd.into(),
            self.mr.into(),
            self.cq.into(),
            self.qp.into(),
            self.qp_number.into(),
            half(high),
            half(low),
            self.buffer_offset,
            self.last_region.into(),
        ];
        let part = path.with_extension("part");
        std::fs::write(&part, numbers.map(|number| number.to_string()).join(" "))?;
        Ok(std::fs::rename(&part, path)?)
    }
}

/// Watches until `file` is gone.
pub fn run(file: &Path) -> Result<(), Failure> {
    let device = devices().into_iter().next().ok_or("There is no device")?;
    let session = Session::open(&device)?;
    let pair = Pair::connected(&session)?;
    let memory = Map::anonymous(BYTES)?;
    let pin = session.pin(&memory, true)?;
    let mr = session.register(pair.pd, pin, &memory, ALL)?;
    let buffer = VerbsStubs(&session).alloc_buffer(&AllocBuffer {
        length: (BYTES as u64).into(),
        ..AllocBuffer::default()
    })?;
    let (handle, offset) = (buffer.handle.get(), buffer.offset.get());
    let hosted = session.transport().map_buffer(handle, offset, BYTES)?;
    for map in [&memory, &hosted] {
        for at in (0..BYTES).step_by(PATTERN.len()) {
            // SAFETY: nobody is to touch this memory.
            unsafe { map.write_bytes(at, PATTERN) };
        }
    }
    Known {
        address: memory.base().addr().get() as u64,
        length: BYTES as u64,
        pd: pair.pd,
        mr: mr.handle.get(),
        cq: pair.cq.handle,
        qp: pair.b.handle,
        qp_number: pair.b.number,
        gid: own_gid(&session)?,
        buffer_offset: offset,
        last_region: pin,
    }
    .write(file)?;
    let mut looks = 0_u64;
    while file.exists() {
        for (name, map) in [("memory", &memory), ("buffer", &hosted)] {
            for at in (0..BYTES).step_by(PATTERN.len()) {
                let mut found = [0; 16];
                // SAFETY: nobody is to touch this memory.
                unsafe { map.read_bytes(at, &mut found) };
                if &found != PATTERN {
                    return Err(format!("The {name} has changed at {at}: {found:x?}").into());
                }
            }
        }
        let status = pair.write_once(&session, 4096)?;
        if status != WC_STATUS_SUCCESS {
            return Err(format!("A write of its own failed with status {status}").into());
        }
        looks += 1;
        std::thread::sleep(PAUSE);
    }
    println!("witness: {looks} looks, {looks} writes of its own, unchanged");
    Ok(())
}
