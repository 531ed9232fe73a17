//! What the service manager that has started a daemon is told: `sd_notify(3)`, whose protocol is
//! documented for others to implement. The socket is connected before the daemon is confined, after
//! which it makes none.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// How long a manager may take to read what others have told it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who has started the daemon, and waits to hear of it; nobody, where it was a shell.
#[derive(Debug, Default)]
pub struct ServiceManager(Option<UnixDatagram>);

impl ServiceManager {
    /// As the environment says.
    #[must_use]
    pub fn find() -> Self {
        Self::at(std::env::var_os("NOTIFY_SOCKET"))
    }

    fn at(name: Option<OsString>) -> Self {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return Self(None);
        };
        let connected = connect(&name);
        if let Err(e) = &connected {
            log::warn!("NOTIFY_SOCKET is {}: {e}", name.display());
        }
        Self(connected.ok())
    }

    /// Whoever connects is served from now on.
    pub fn ready(&self) {
        self.tell("READY=1\nSTATUS=Serving");
    }

    /// It ends.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=Ending: requests that were accepted are finished");
    }

    fn tell(&self, state: &str) {
        let told = self.0.as_ref().map(|socket| socket.send(state.as_bytes()));
        if let Some(Err(e)) = told {
            log::warn!("The service manager is not told of {state:?}: {e}");
        }
    }
}

fn connect(name: &OsStr) -> std::io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    // One that has much to read is waited for, and not for ever.
    socket.set_write_timeout(Some(PATIENCE))?;
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_manager_hears_that_a_daemon_serves_and_that_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let unique = format!("farlane-test-{}", std::process::id());
        let addresses = [
            (
                SocketAddr::from_pathname(&path).unwrap(),
                path.clone().into(),
            ),
            (
                SocketAddr::from_abstract_name(&unique).unwrap(),
                OsString::from(format!("@{unique}")),
            ),
        ];
        for (address, name) in addresses {
            let listener = UnixDatagram::bind_addr(&address).unwrap();
            let manager = ServiceManager::at(Some(name));
            manager.ready();
            manager.stopping();
            let mut buffer = [0; 256];
            for first in ["READY=1", "STOPPING=1"] {
                let bytes = listener.recv(&mut buffer).unwrap();
                let said = str::from_utf8(&buffer[..bytes]).unwrap();
                assert_eq!(said.lines().next(), Some(first));
            }
        }
        // Nobody is there, and nobody was to be.
        for name in [None, Some("".into()), Some("/nowhere/at all".into())] {
            ServiceManager::at(name).ready();
        }
    }
}
