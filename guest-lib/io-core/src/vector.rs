//! Calls with several buffers, some of them device memory.

use crate::config::{self, Mode};
use crate::files::{self, OpenFile};
use crate::fork::Inside;
use crate::position::{self, CallBuffer, KernelCall, Position};
use crate::region::Buffer;
use crate::sys::{self, Direction};
use crate::{registry, route};
use rustix::io::Errno;
use std::os::fd::RawFd;

/// Most buffers of a call (`IOV_MAX`).
const MOST_BUFFERS: usize = 1024;

/// A call with several buffers.
#[derive(Clone, Copy, Debug)]
pub struct VectorCall<'a> {
    /// Its name, for the trace.
    pub name: &'static str,
    /// The program's descriptor.
    pub fd: RawFd,
    /// Buffers of the call, in order.
    pub buffers: &'a [libc::iovec],
    /// Where in the file.
    pub position: Position,
}

/// Reads or writes; none for a call without device memory, or one that the router does not serve.
pub fn serve(call: &VectorCall<'_>, direction: Direction) -> Option<Result<usize, Errno>> {
    let mode = config::mode();
    if mode == Mode::Off || call.buffers.len() > MOST_BUFFERS {
        return None;
    }
    let ours =
        |buffer: &libc::iovec| registry::is_registered(buffer.iov_base.addr(), buffer.iov_len);
    if !call.buffers.iter().any(ours) {
        return None;
    }
    let lengths = call.buffers.iter().map(|buffer| buffer.iov_len);
    let total = lengths.clone().try_fold(0_usize, usize::checked_add)?;
    isize::try_from(total).ok()?;
    let _inside = Inside::enter()?;
    for buffer in call.buffers {
        let (address, length) = (buffer.iov_base.addr(), buffer.iov_len);
        if let Some(region) = registry::find(address, length) {
            drop(registry::still_there(region, address, length));
        }
    }
    if !call.buffers.iter().any(ours) {
        return None;
    }
    let opened = files::open(call.fd)?;
    if !route::may(&opened, direction) {
        return None;
    }
    if position::is_needed(&opened, call.position, direction) {
        return Some(as_one(&opened, call, direction, mode));
    }
    let Position::At(offset) = call.position else {
        return None;
    };
    // Buffers of direct I/O are one request; cut to pieces it would be aligned otherwise.
    if opened.flags.contains(rustix::fs::OFlags::DIRECT) {
        return None;
    }
    let total = total.min(sys::MAX_BYTES);
    Some(one_by_one(&opened, call, offset, total, direction, mode))
}

/// All buffers in one call of the kernel.
fn as_one(
    opened: &OpenFile,
    call: &VectorCall<'_>,
    direction: Direction,
    mode: Mode,
) -> Result<usize, Errno> {
    let buffers = call.buffers.iter().map(|buffer| {
        let address = buffer.iov_base.expose_provenance();
        (address, buffer.iov_len)
    });
    let held: Vec<_> = buffers
        .map(|(address, length)| (address, length, registry::find(address, length)))
        .collect();
    let parts: Vec<_> = held
        .iter()
        .map(|(address, length, region)| CallBuffer {
            address: *address,
            length: *length,
            region: region.as_deref(),
        })
        .collect();
    position::serve(&KernelCall {
        opened,
        name: call.name,
        parts: &parts,
        position: call.position,
        direction,
        mode,
    })
}

fn one_by_one(
    opened: &OpenFile,
    call: &VectorCall<'_>,
    offset: u64,
    total: usize,
    direction: Direction,
    mode: Mode,
) -> Result<usize, Errno> {
    if offset > i64::MAX.unsigned_abs() {
        return Err(Errno::INVAL);
    }
    let mut done = 0;
    for buffer in call.buffers {
        let address = buffer.iov_base.expose_provenance();
        let length = buffer.iov_len.min(total - done);
        if length == 0 {
            continue;
        }
        let at = offset.checked_add(done as u64).ok_or(Errno::INVAL)?;
        let result = match registry::find(address, length) {
            Some(region) => {
                let buffer = Buffer {
                    address,
                    length,
                    region: &region,
                };
                route::one(opened, call.name, &buffer, at, direction, mode)
            }
            // SAFETY: the program's own buffer.
            None => unsafe { sys::transfer(direction, call.fd, buffer.iov_base, length, at) },
        };
        match result {
            Ok(moved) => done += moved,
            Err(error) if done == 0 => return Err(error),
            Err(_) => break,
        }
        if !result.is_ok_and(|moved| moved == length) {
            break;
        }
    }
    Ok(done)
}
