//! The device through which a VM's processes register device memory, on its socket.

use crate::tunnel::Tunnel;
use farlane_guest_device::control::RequestCounters;
use farlane_guest_device::device::{FarlaneDevice, Vm};
use farlane_vhost_user::serve::serve;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Serves one VMM after the other on `socket`, from a thread of its own. What is asked is counted
/// in `counters`.
///
/// # Errors
/// The system has no more threads.
pub fn start(tunnel: &Tunnel, socket: OwnedFd, counters: Arc<RequestCounters>) -> io::Result<()> {
    let name = "tunnel";
    let vm = Vm {
        name: name.to_owned(),
        contexts: tunnel.contexts(),
        window_bytes: 0,
        counters,
    };
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            serve(name, socket, |channel| {
                FarlaneDevice::new(vm.clone(), channel)
            })
        })?;
    Ok(())
}
