//! Where a lender listens.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Why an address is none.
#[derive(Debug, Error)]
pub enum AddressError {
    /// It begins with no known word.
    #[error("{0:?} is not unix:PATH, tls:HOST:PORT or tcp:127.0.0.1:PORT")]
    Form(String),
    /// The host cannot be found.
    #[error("{0:?} cannot be resolved")]
    Host(String, #[source] std::io::Error),
    /// Control traffic in the clear leaves the host.
    #[error("{0} is not a loopback address: use tls:")]
    NotLoopback(SocketAddr),
    /// A UNIX socket without a path.
    #[error("unix: needs a path")]
    NoPath,
}

/// Where a lender listens, and how one talks to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A UNIX socket: `unix:PATH`.
    Unix(PathBuf),
    /// TLS with both ends authenticated: `tls:HOST:PORT`.
    Tls {
        /// Name or address of the host, as its certificate has it.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// In the clear on this host: `tcp:127.0.0.1:PORT`.
    Loopback(SocketAddr),
}

impl Address {
    /// TCP addresses of it; none for a UNIX socket.
    ///
    /// # Errors
    /// [`AddressError::Host`].
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, AddressError> {
        match self {
            Self::Unix(_) => Ok(Vec::new()),
            Self::Loopback(address) => Ok(vec![*address]),
            Self::Tls { host, port } => (host.as_str(), *port)
                .to_socket_addrs()
                .map(Iterator::collect)
                .map_err(|e| AddressError::Host(host.clone(), e)),
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let form = || AddressError::Form(text.to_owned());
        let (kind, rest) = text.split_once(':').ok_or_else(form)?;
        match kind {
            "unix" if rest.is_empty() => Err(AddressError::NoPath),
            "unix" => Ok(Self::Unix(rest.into())),
            "tcp" => {
                let address: SocketAddr = rest.parse().map_err(|_| form())?;
                if !address.ip().is_loopback() {
                    return Err(AddressError::NotLoopback(address));
                }
                Ok(Self::Loopback(address))
            }
            "tls" => {
                let (host, port) = rest.rsplit_once(':').ok_or_else(form)?;
                let host = host.trim_start_matches('[').trim_end_matches(']');
                if host.is_empty() {
                    return Err(form());
                }
                Ok(Self::Tls {
                    host: host.to_owned(),
                    port: port.parse().map_err(|_| form())?,
                })
            }
            _ => Err(form()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tls { host, port } if host.contains(':') => write!(f, "tls:[{host}]:{port}"),
            Self::Tls { host, port } => write!(f, "tls:{host}:{port}"),
            Self::Loopback(address) => write!(f, "tcp:{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in [
            "unix:/run/farlane/lend.sock",
            "tls:lender.example:7411",
            "tls:[fd00::1]:7411",
            "tcp:127.0.0.1:7411",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn traffic_in_the_clear_stays_on_the_host() {
        assert!(matches!(
            "tcp:192.0.2.1:7411".parse::<Address>(),
            Err(AddressError::NotLoopback(_))
        ));
        for text in [
            "",
            "unix:",
            "/run/x",
            "tls:host",
            "tls::1",
            "tcp:localhost:1",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
