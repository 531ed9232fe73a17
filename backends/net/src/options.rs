//! The command line.

use crate::port::tap::MAX_QUEUES;
use farlane_daemon::options::{DaemonOptions, LocalityOptions};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;
use thiserror::Error;

/// Least and most MTU (virtio 1.2, 5.1.4.1).
const MTU: std::ops::RangeInclusive<u16> = 68..=65_535;

/// Network interfaces for a virtual machine
#[derive(Clone, Debug, clap::Parser)]
#[command(name = "farlane-net", version)]
pub struct Options {
    /// An interface: where its VMM finds it (a vhost-user socket to make, or an inherited listening one), and the tap that it is
    /// connected to. queues=N queue pairs, mac=M, mtu=N, id=S for the counters
    #[arg(
        long = "net",
        value_name = "socket=PATH|fd=N,tap=NAME[,KEY=VALUE]...",
        required_unless_present_any = ["tap", "print_capabilities"]
    )]
    pub nets: Vec<NetOptions>,

    /// One interface by itself: the tap that it is connected to. One that is not there is made, and goes when this ends
    #[arg(long, value_name = "NAME")]
    pub tap: Option<String>,

    /// The vhost-user socket of that interface
    #[arg(long, value_name = "PATH", requires = "tap")]
    pub socket_path: Option<PathBuf>,

    /// A listening vhost-user socket of that interface, as an inherited descriptor
    #[arg(
        long,
        value_name = "N",
        requires = "tap",
        conflicts_with = "socket_path"
    )]
    pub fd: Option<RawFd>,

    /// Its queue pairs
    #[arg(long, value_name = "N", requires = "tap", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES)))]
    pub queues: u16,

    /// Its address, for a VMM that does not choose one itself; made of the tap's where it is not given
    #[arg(long, value_name = "M", requires = "tap")]
    pub mac: Option<Mac>,

    /// Sets the tap's MTU, which the guest is told; otherwise it is left as it is
    #[arg(long, value_name = "BYTES", requires = "tap", value_parser = clap::value_parser!(u16).range(i64::from(*MTU.start())..))]
    pub mtu: Option<u16>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub locality: LocalityOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

impl Options {
    /// All interfaces, of which no two have anything that must be their own.
    ///
    /// # Errors
    /// See [`OptionsError`].
    pub fn all_nets(&self) -> Result<Vec<NetOptions>, OptionsError> {
        let mut nets = self.nets.clone();
        if let Some(tap) = &self.tap {
            let socket = match (&self.socket_path, self.fd) {
                (Some(path), _) => SocketOption::Path(path.clone()),
                (None, Some(fd)) => SocketOption::Descriptor(fd),
                (None, None) => return Err(OptionsError::Missing("--socket-path or --fd")),
            };
            nets.push(NetOptions {
                socket,
                tap: tap.clone(),
                id: tap.clone(),
                queues: self.queues,
                mac: self.mac,
                mtu: self.mtu,
            });
        }
        let mut sockets: Vec<_> = nets.iter().map(|net| net.socket.to_string()).collect();
        sockets.extend(
            self.daemon
                .metrics
                .iter()
                .map(|path| path.display().to_string()),
        );
        let mut taps: Vec<_> = nets.iter().map(|net| net.tap.clone()).collect();
        let mut ids: Vec<_> = nets.iter().map(|net| net.id.clone()).collect();
        for values in [&mut sockets, &mut taps, &mut ids] {
            values.sort();
            if let Some(pair) = values.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(OptionsError::Twice(pair[0].clone()));
            }
        }
        Ok(nets)
    }
}

/// Why the command line cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum OptionsError {
    /// A socket, tap or name for two interfaces.
    #[error("{0} is given twice")]
    Twice(String),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key that is not known, or comes twice.
    #[error("{0:?} is not known here, or given twice")]
    Unknown(String),
    /// A value that is none.
    #[error("{value:?} is not {wanted}")]
    Value {
        /// What was given.
        value: String,
        /// What it should be.
        wanted: &'static str,
    },
}

/// Where a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketOption {
    /// A socket to make.
    Path(PathBuf),
    /// One that is inherited.
    Descriptor(RawFd),
}

impl std::fmt::Display for SocketOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Descriptor(fd) => write!(f, "descriptor {fd}"),
        }
    }
}

/// An address of an interface: not one of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let mut bytes = [0; 6];
            let mut words = text.split(':');
            for byte in &mut bytes {
                let word = words.next().filter(|word| word.len() == 2)?;
                *byte = u8::from_str_radix(word, 16).ok()?;
            }
            let is_one = bytes[0] & 1 == 0 && bytes != [0; 6];
            (words.next().is_none() && is_one).then_some(Self(bytes))
        };
        value(text, "an address such as 52:54:00:12:34:56", parse())
    }
}

/// An interface, and where it is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetOptions {
    /// Where.
    pub socket: SocketOption,
    /// Its tap.
    pub tap: String,
    /// What it is called in counters.
    pub id: String,
    /// Its queue pairs.
    pub queues: u16,
    /// Its address.
    pub mac: Option<Mac>,
    /// The MTU to set.
    pub mtu: Option<u16>,
}

fn value<T>(value: &str, wanted: &'static str, parsed: Option<T>) -> Result<T, OptionsError> {
    parsed.ok_or_else(|| OptionsError::Value {
        value: value.to_owned(),
        wanted,
    })
}

impl FromStr for NetOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (mut socket, mut tap, mut id) = (None, None, None);
        let (mut queues, mut mac, mut mtu) = (1, None, None);
        let mut seen = Vec::new();
        for word in text.split(',') {
            let unknown = || OptionsError::Unknown(word.to_owned());
            let (key, given) = word.split_once('=').ok_or_else(unknown)?;
            // Two names of one thing.
            let name = if key == "fd" { "socket" } else { key };
            if given.is_empty() || seen.contains(&name) {
                return Err(unknown());
            }
            seen.push(name);
            match key {
                "socket" => socket = Some(SocketOption::Path(given.into())),
                "fd" => {
                    let fd = value(given, "a descriptor", given.parse().ok())?;
                    socket = Some(SocketOption::Descriptor(fd));
                }
                "tap" => tap = Some(given.to_owned()),
                "id" => {
                    let plain = !given.contains(['"', '\\']);
                    id = Some(value(
                        given,
                        "a name without quotes",
                        plain.then(|| given.to_owned()),
                    )?);
                }
                "queues" => {
                    let number = given.parse().ok();
                    let number = number.filter(|n| (1..=MAX_QUEUES).contains(n));
                    queues = value(given, "a number from 1 to 256", number)?;
                }
                "mac" => mac = Some(given.parse()?),
                "mtu" => {
                    let number = given.parse().ok().filter(|n| MTU.contains(n));
                    mtu = Some(value(given, "a number from 68 to 65535", number)?);
                }
                _ => return Err(unknown()),
            }
        }
        let tap = tap.ok_or(OptionsError::Missing("tap"))?;
        Ok(Self {
            socket: socket.ok_or(OptionsError::Missing("socket or fd"))?,
            id: id.unwrap_or_else(|| tap.clone()),
            tap,
            queues,
            mac,
            mtu,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    fn parse(words: &[&str]) -> Options {
        Options::try_parse_from([&["farlane-net"], words].concat()).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
    }

    #[test]
    fn interfaces_are_read() {
        let net: NetOptions = "socket=/s,tap=t0,queues=4,mac=52:54:00:12:34:5f,mtu=9000,id=lan"
            .parse()
            .unwrap();
        assert_eq!(
            net,
            NetOptions {
                socket: SocketOption::Path("/s".into()),
                tap: "t0".to_owned(),
                id: "lan".to_owned(),
                queues: 4,
                mac: Some(Mac([0x52, 0x54, 0, 0x12, 0x34, 0x5f])),
                mtu: Some(9000),
            }
        );
        for text in [
            "",
            "socket=/s",
            "tap=t",
            "socket=/s,fd=3,tap=t",
            "socket=/s,tap=t,queues=0",
            "socket=/s,tap=t,queues=257",
            "socket=/s,tap=t,mac=01:00:00:00:00:01",
            "socket=/s,tap=t,mac=52:54:00:12:34",
            "socket=/s,tap=t,mac=52:54:00:12:34:56:78",
            "socket=/s,tap=t,mac=+5:54:00:12:34:56",
            "socket=/s,tap=t,mtu=67",
            "socket=/s,tap=t,id=a\"b",
            "socket=/s,tap=t,colour=blue",
        ] {
            assert!(text.parse::<NetOptions>().is_err(), "{text}");
        }
    }

    #[test]
    fn one_interface_needs_no_list() {
        let nets = parse(&["--socket-path", "/s", "--tap", "t", "--queues", "2"])
            .all_nets()
            .unwrap();
        assert_eq!((nets[0].queues, nets[0].id.as_str()), (2, "t"));
        assert!(parse(&["--tap", "t"]).all_nets().is_err());
        for words in [
            &["farlane-net"][..],
            &["farlane-net", "--fd", "3"],
            &["farlane-net", "--tap", "t", "--fd", "3", "--queues", "0"],
        ] {
            assert!(Options::try_parse_from(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn what_must_be_an_interfaces_own_is_given_once() {
        let twice = |one: &str, two: &str| parse(&["--net", one, "--net", two]).all_nets();
        assert!(twice("socket=/s,tap=a", "socket=/t,tap=b").is_ok());
        assert!(twice("socket=/s,tap=a", "socket=/s,tap=b").is_err());
        assert!(twice("socket=/s,tap=a", "socket=/t,tap=a").is_err());
        assert!(twice("socket=/s,tap=a,id=x", "socket=/t,tap=b,id=x").is_err());
    }
}
