//! The command line.

use crate::port::tap::MAX_QUEUES;
use crate::port::xdp;
use farlane_daemon::keys::{Keys, all_different, value};
pub use farlane_daemon::keys::{KeysError as OptionsError, SocketOption};
use farlane_daemon::options::{DaemonOptions, LocalityOptions};
use farlane_daemon::reload::ControlOptions;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::str::FromStr;

/// Least and most MTU (virtio 1.2, 5.1.4.1).
const MTU: std::ops::RangeInclusive<u16> = 68..=65_535;

/// Network interfaces for a virtual machine
#[derive(Clone, Debug, clap::Parser)]
#[command(
    name = "farlane-net",
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct Options {
    /// An interface: where its VMM finds it (a vhost-user socket to make, or an inherited listening
    /// one), and the tap or the interface of the host that it is connected to. queues=N queue
    /// pairs, mac=M, mtu=N of a tap, mode=MODE of xdp, id=S for the counters
    #[arg(
        long = "net",
        value_name = "socket=PATH|fd=N,tap=NAME|xdp=NAME[,KEY=VALUE]...",
        required_unless_present_any = ["host", "print_capabilities"]
    )]
    pub nets: Vec<NetOptions>,

    /// One interface by itself: the tap that it is connected to. One that is not there is made, and
    /// goes when this ends
    #[arg(long, value_name = "NAME", group = "host")]
    pub tap: Option<String>,

    /// In place of a tap, queues of an interface of the host, over AF_XDP: all its frames are the
    /// guest's. MODE: native, generic, copy or zerocopy; otherwise the best that its driver has
    #[arg(long, value_name = "NAME[,queues=N][,mode=MODE]", group = "host")]
    pub xdp: Option<XdpOptions>,

    /// The vhost-user socket of that interface
    #[arg(long, value_name = "PATH", requires = "host")]
    pub socket_path: Option<PathBuf>,

    /// A listening vhost-user socket of that interface, as an inherited descriptor
    #[arg(
        long,
        value_name = "N",
        requires = "host",
        conflicts_with = "socket_path"
    )]
    pub fd: Option<RawFd>,

    /// Its queue pairs
    #[arg(
        long,
        value_name = "N",
        requires = "host",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_QUEUES))
    )]
    pub queues: u16,

    /// Its address, for a VMM that does not choose one itself; made of the host's where it is not
    /// given
    #[arg(long, value_name = "M", requires = "host")]
    pub mac: Option<Mac>,

    /// Sets the tap's MTU, which the guest is told; otherwise it is left as it is
    #[arg(
        long,
        value_name = "BYTES",
        requires = "tap",
        conflicts_with = "xdp",
        value_parser = clap::value_parser!(u16).range(i64::from(*MTU.start())..)
    )]
    pub mtu: Option<u16>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub locality: LocalityOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub control: ControlOptions,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub daemon: DaemonOptions,
}

impl Options {
    /// All interfaces, of which no two have anything that must be their own.
    pub fn all_nets(&self) -> Result<Vec<NetOptions>, OptionsError> {
        let mut nets = self.nets.clone();
        let tap = self
            .tap
            .clone()
            .map(|name| (HostOption::Tap(name), self.queues));
        let xdp = self.xdp.clone().map(|xdp| {
            let queues = xdp.queues.unwrap_or(self.queues);
            (HostOption::Xdp(xdp.name, xdp.mode), queues)
        });
        if let Some((host, queues)) = tap.or(xdp) {
            nets.push(NetOptions {
                socket: SocketOption::of(self.socket_path.as_ref(), self.fd)?,
                id: host.name().to_owned(),
                host,
                queues,
                mac: self.mac,
                mtu: self.mtu,
            });
        }
        let mut sockets: Vec<_> = nets.iter().map(|net| net.socket.to_string()).collect();
        let metrics = self.daemon.metrics_paths().into_iter();
        sockets.extend(metrics.map(|path| path.display().to_string()));
        let hosts: Vec<_> = nets.iter().map(|net| net.host.name().to_owned()).collect();
        let ids: Vec<_> = nets.iter().map(|net| net.id.clone()).collect();
        self.control.check(sockets)?;
        for values in [hosts, ids] {
            all_different(values)?;
        }
        Ok(nets)
    }
}

/// What an interface is connected to on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostOption {
    /// A tap.
    Tap(String),
    /// Queues of an interface.
    Xdp(String, xdp::Mode),
}

impl HostOption {
    /// Its name there.
    pub fn name(&self) -> &str {
        match self {
            Self::Tap(name) | Self::Xdp(name, _) => name,
        }
    }
}

/// Queues of an interface of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpOptions {
    /// Its name.
    pub name: String,
    /// How many, if it is said here.
    pub queues: Option<u16>,
    /// How frames are taken.
    pub mode: xdp::Mode,
}

impl FromStr for XdpOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, mut keys) = Keys::split_first(text);
        let name = Some(name).filter(|name| !name.is_empty());
        let options = Self {
            name: value(text, "an interface", name)?,
            queues: queues(&mut keys)?,
            mode: mode(&mut keys)?.unwrap_or(xdp::Mode::Any),
        };
        keys.finish()?;
        Ok(options)
    }
}

fn queues(keys: &mut Keys) -> Result<Option<u16>, OptionsError> {
    let fits = |n: &u16| (1..=MAX_QUEUES).contains(n);
    keys.parse("queues", "a number from 1 to 256", |text| {
        text.parse().ok().filter(fits)
    })
}

fn mode(keys: &mut Keys) -> Result<Option<xdp::Mode>, OptionsError> {
    keys.parse("mode", "native, generic, copy or zerocopy", |text| {
        text.parse().ok()
    })
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
    /// What it is connected to.
    pub host: HostOption,
    /// What it is called in counters.
    pub id: String,
    /// Its queue pairs.
    pub queues: u16,
    /// Its address.
    pub mac: Option<Mac>,
    /// The MTU to set.
    pub mtu: Option<u16>,
}

impl FromStr for NetOptions {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut keys = Keys::split(text);
        let socket = keys.socket()?;
        let how = mode(&mut keys)?;
        let mtu = keys.parse("mtu", "a number from 68 to 65535", |text| {
            text.parse().ok().filter(|n| MTU.contains(n))
        })?;
        let host = match (keys.take("tap"), keys.take("xdp"), how, mtu) {
            (Some(_), None, Some(_), _) => return Err(OptionsError::Unknown("mode".into())),
            // The MTU of a NIC is its administrator's.
            (None, Some(_), _, Some(_)) => return Err(OptionsError::Unknown("mtu".into())),
            (Some(_), Some(_), ..) => return Err(OptionsError::Twice("tap or xdp".into())),
            (Some(tap), None, ..) => Some(HostOption::Tap(tap)),
            (None, Some(xdp), how, _) => Some(HostOption::Xdp(xdp, how.unwrap_or(xdp::Mode::Any))),
            (None, None, ..) => None,
        };
        let id = keys.parse("id", "a name without quotes", |id| {
            (!id.contains(['"', '\\'])).then(|| id.to_owned())
        })?;
        let queues = queues(&mut keys)?;
        let mac = keys.take("mac").map(|mac| mac.parse()).transpose()?;
        keys.finish()?;
        let host = host.ok_or(OptionsError::Missing("tap or xdp"))?;
        Ok(Self {
            socket: socket.ok_or(OptionsError::Missing("socket or fd"))?,
            id: id.unwrap_or_else(|| host.name().to_owned()),
            host,
            queues: queues.unwrap_or(1),
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
                host: HostOption::Tap("t0".to_owned()),
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
            "socket=/s,tap=t,xdp=e",
            "socket=/s,tap=t,mode=copy",
            "socket=/s,xdp=e,mode=fast",
            "socket=/s,xdp=e,mtu=9000",
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
    fn queues_of_an_interface_take_the_place_of_a_tap() {
        let net: NetOptions = "socket=/s,xdp=eth1,queues=2,mode=zerocopy".parse().unwrap();
        let host = HostOption::Xdp("eth1".to_owned(), xdp::Mode::ZeroCopy);
        assert_eq!((net.host, net.queues, net.id.as_str()), (host, 2, "eth1"));
        for (words, queues) in [
            (&["--xdp", "eth1,queues=3,mode=copy", "--fd", "3"][..], 3),
            (
                &["--xdp", "eth1,mode=copy", "--queues", "4", "--fd", "3"],
                4,
            ),
        ] {
            let nets = parse(words).all_nets().unwrap();
            let host = HostOption::Xdp("eth1".to_owned(), xdp::Mode::Copy);
            assert_eq!((&nets[0].host, nets[0].queues), (&host, queues));
        }
        for words in [
            &["farlane-net", "--xdp", "e", "--tap", "t", "--fd", "3"][..],
            &["farlane-net", "--xdp", "e,mode=fast", "--fd", "3"],
            &["farlane-net", "--xdp", ",mode=copy", "--fd", "3"],
            &["farlane-net", "--xdp", "e", "--mtu", "9000", "--fd", "3"],
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
