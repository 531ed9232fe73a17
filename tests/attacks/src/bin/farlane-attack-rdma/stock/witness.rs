//! The victim beside it: memory with a known pattern, registered with every right, and traffic of
//! its own. It tells the attacker all that it has.

use super::objects::register;
use super::pair::Pair;
use super::uverbs::own_gid;
use crate::Failure;
use crate::pair::{ALL, address};
use crate::witness::{BYTES, Known, PATTERN, PAUSE};
use farlane_transport::Map;
use std::path::Path;

/// Watches until `file` is gone.
pub fn run(file: &Path) -> Result<(), Failure> {
    let pair = Pair::connected()?;
    let memory = Map::anonymous(BYTES)?;
    let mr = register(&pair.device, pair.pd, &memory, ALL)?;
    for at in (0..BYTES).step_by(PATTERN.len()) {
        // SAFETY: nobody is to touch this memory.
        unsafe { memory.write_bytes(at, PATTERN) };
    }
    Known {
        address: address(&memory),
        length: BYTES as u64,
        pd: pair.pd,
        mr: mr.rkey,
        cq: pair.cq.handle,
        qp: pair.b.handle,
        qp_number: pair.b.number,
        gid: own_gid()?,
        buffer_offset: pair.a.send.token,
        last_region: mr.handle,
    }
    .write(file)?;
    let mut looks = 0_u64;
    while file.exists() {
        for at in (0..BYTES).step_by(PATTERN.len()) {
            let mut found = [0; 16];
            // SAFETY: nobody is to touch this memory.
            unsafe { memory.read_bytes(at, &mut found) };
            if &found != PATTERN {
                return Err(format!("Its memory has changed at {at}: {found:x?}").into());
            }
        }
        match pair.write(4096) {
            Ok(0) => {}
            status => return Err(format!("A write of its own: {status:?}").into()),
        }
        looks += 1;
        std::thread::sleep(PAUSE);
    }
    println!("witness: {looks} looks, {looks} writes of its own, unchanged");
    Ok(())
}
