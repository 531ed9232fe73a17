//! The configuration file. A key that is not known where it stands is refused, with its line: a
//! typing error in a list of borrowers would otherwise lend to everybody.

use crate::config::{
    AddressText, Backing, BlockBytes, BridgeConfig, CacheMode, Config, DeviceConfig, DoorbellMode,
    Function, FunctionAddress, GpuOptions, NvmeOptions, ShowsConfig, Size, SourceConfig, TlsFiles,
    UserConfig, WindowConfig,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops;
use std::path::{Path, PathBuf};
use thiserror::Error;
use toml::{Spanned, Value};

/// Why there is no configuration.
#[derive(Debug, Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The error of the system call.
        #[source]
        source: std::io::Error,
    },
    /// Its text is not a configuration.
    #[error("{} is not a configuration of a lender", path.display())]
    Parse {
        /// Path of the file.
        path: PathBuf,
        /// The line and what is wrong with it.
        #[source]
        source: TextError,
    },
}

/// Why a text is not a configuration.
#[derive(Debug, Error)]
pub enum TextError {
    /// It is not TOML, or has an unknown key, or a value that is none.
    #[error(transparent)]
    Toml(#[from] Box<toml::de::Error>),
    /// A key of another kind of device or window.
    #[error("Line {line}: `{key}` is not a key of {table}")]
    Misplaced {
        /// Line, from 1 on.
        line: usize,
        /// Name of the key.
        key: &'static str,
        /// The kind of table that it stands in.
        table: &'static str,
    },
    /// Two of what has one name.
    #[error("There are two {0}")]
    Twice(String),
    /// A key that this kind of device or window needs.
    #[error("Line {line}: {table} needs the key `{key}`")]
    Missing {
        /// First line of the table, from 1 on.
        line: usize,
        /// Name of the key.
        key: &'static str,
        /// The kind of table that needs it.
        table: &'static str,
    },
}

impl Config {
    /// Reads a configuration file.
    ///
    /// # Errors
    /// See [`FileError`].
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text).map_err(|source| FileError::Parse {
            path: path.to_owned(),
            source,
        })
    }

    /// Parses the text of a configuration file.
    ///
    /// # Errors
    /// See [`TextError`].
    pub fn parse(text: &str) -> Result<Self, TextError> {
        let mut keys: TopKeys = toml::from_str(text).map_err(Box::new)?;
        let common = keys.common();
        let devices = keys.device.into_iter().map(|table| device(table, text));
        let windows = keys.window.into_iter().map(|table| window(table, text));
        let config = Self {
            name: keys.name,
            listen: keys.listen,
            term_seconds: keys.term_seconds,
            grace_seconds: keys.grace_seconds,
            tls: keys.tls,
            devices: devices.collect::<Result<_, _>>()?,
            windows: windows.collect::<Result<_, _>>()?,
            lenders: keys.lenders,
            users: keys.user,
            common,
        };
        match config.twice() {
            Some(what) => Err(TextError::Twice(what)),
            None => Ok(config),
        }
    }

    /// What is there twice: of two lists of borrowers one would count.
    fn twice(&self) -> Option<String> {
        let devices = self.devices.iter().map(|of| format!("devices {}", of.name));
        let windows = self.windows.iter().map(|of| format!("windows {}", of.name));
        let users = self.users.iter().map(|of| format!("users {}", of.uid));
        let mut found = BTreeSet::new();
        let mut all = devices.chain(windows).chain(users);
        all.find(|what| !found.insert(what.clone()))
    }
}

/// A key that only some tables have.
type Key<T> = Option<Spanned<T>>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct TopKeys {
    name: Option<String>,
    #[serde(default)]
    listen: Vec<AddressText>,
    term_seconds: Option<u16>,
    grace_seconds: Option<u16>,
    tls: Option<TlsFiles>,
    #[serde(default)]
    lenders: Vec<String>,
    #[serde(default)]
    device: Vec<Spanned<DeviceKeys>>,
    #[serde(default)]
    window: Vec<Spanned<WindowKeys>>,
    #[serde(default)]
    user: Vec<UserConfig>,
    // Options of every daemon, which are read as those of the command line are
    // ([`farlane_daemon::config`]).
    metrics: Option<Value>,
    socket_group: Option<Value>,
    socket_mode: Option<Value>,
    seccomp: Option<Value>,
    log_level: Option<Value>,
}

impl TopKeys {
    /// The options of every daemon, by their keys.
    fn common(&mut self) -> BTreeMap<&'static str, String> {
        let values = [
            ("metrics", self.metrics.take()),
            ("socket-group", self.socket_group.take()),
            ("socket-mode", self.socket_mode.take()),
            ("seccomp", self.seccomp.take()),
            ("log-level", self.log_level.take()),
        ];
        let told = values
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?)));
        told.map(|(key, value)| (key, value.to_string())).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SourceKind {
    Nvme,
    Gpu,
    Vfio,
}

/// `[[device]]`: the keys of every source.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceKeys {
    name: String,
    #[serde(default)]
    borrowers: Vec<String>,
    source: SourceKind,
    namespace: Key<Vec<Backing>>,
    serial: Key<String>,
    doorbells: Key<DoorbellMode>,
    cache: Key<CacheMode>,
    block: Key<BlockBytes>,
    queues: Key<u16>,
    #[serde(rename = "read-only")]
    read_only: Key<bool>,
    memory: Key<Size>,
    function: Key<FunctionAddress>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum NtbKind {
    Ivshmem,
    Pci,
}

/// `[[window]]`: the keys of every bridge.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WindowKeys {
    name: String,
    borrowers: Vec<String>,
    ntb: NtbKind,
    function: FunctionAddress,
    bar: Key<u8>,
    offset: Key<u64>,
    size: Key<Size>,
    shows: Option<ShowsConfig>,
}

/// A table of one kind: which keys it may have, and which it must.
struct Table<'a> {
    text: &'a str,
    span: ops::Range<usize>,
    name: &'static str,
}

impl Table<'_> {
    fn line(&self, span: &ops::Range<usize>) -> usize {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        before.matches('\n').count() + 1
    }

    /// The key belongs to tables of another kind.
    fn refuse<T>(&self, key: &'static str, value: &Key<T>) -> Result<(), TextError> {
        match value {
            Some(value) => Err(TextError::Misplaced {
                line: self.line(&value.span()),
                key,
                table: self.name,
            }),
            None => Ok(()),
        }
    }

    fn require<T>(&self, key: &'static str, value: Key<T>) -> Result<T, TextError> {
        let value = value.map(Spanned::into_inner);
        value.ok_or_else(|| TextError::Missing {
            line: self.line(&self.span),
            key,
            table: self.name,
        })
    }
}

/// The value, or what holds where the key is absent.
fn value<T: Default>(key: Key<T>) -> T {
    key.map(Spanned::into_inner).unwrap_or_default()
}

fn device(table: Spanned<DeviceKeys>, text: &str) -> Result<DeviceConfig, TextError> {
    let span = table.span();
    let keys = table.into_inner();
    let kind = keys.source;
    let table = Table {
        text,
        span,
        name: match kind {
            SourceKind::Nvme => "a device with the source nvme",
            SourceKind::Gpu => "a device with the source gpu",
            SourceKind::Vfio => "a device with the source vfio",
        },
    };
    if kind != SourceKind::Nvme {
        table.refuse("namespace", &keys.namespace)?;
        table.refuse("serial", &keys.serial)?;
        table.refuse("doorbells", &keys.doorbells)?;
        table.refuse("cache", &keys.cache)?;
        table.refuse("block", &keys.block)?;
        table.refuse("queues", &keys.queues)?;
        table.refuse("read-only", &keys.read_only)?;
    }
    if kind != SourceKind::Gpu {
        table.refuse("memory", &keys.memory)?;
    }
    if kind != SourceKind::Vfio {
        table.refuse("function", &keys.function)?;
    }
    let source = match kind {
        SourceKind::Nvme => SourceConfig::Nvme(NvmeOptions {
            namespaces: table.require("namespace", keys.namespace)?,
            serial: keys.serial.map(Spanned::into_inner),
            doorbells: value(keys.doorbells),
            cache: value(keys.cache),
            block: value(keys.block),
            queues: keys.queues.map(Spanned::into_inner),
            read_only: value(keys.read_only),
        }),
        SourceKind::Gpu => SourceConfig::Gpu(GpuOptions {
            memory: keys.memory.map(Spanned::into_inner),
        }),
        SourceKind::Vfio => SourceConfig::Vfio(Function {
            function: table.require("function", keys.function)?,
        }),
    };
    Ok(DeviceConfig {
        name: keys.name,
        borrowers: keys.borrowers,
        source,
    })
}

fn window(table: Spanned<WindowKeys>, text: &str) -> Result<WindowConfig, TextError> {
    let span = table.span();
    let keys = table.into_inner();
    let table = Table {
        text,
        span,
        name: match keys.ntb {
            NtbKind::Ivshmem => "a window with the ntb ivshmem",
            NtbKind::Pci => "a window with the ntb pci",
        },
    };
    let bridge = match keys.ntb {
        NtbKind::Ivshmem => {
            table.refuse("bar", &keys.bar)?;
            table.refuse("offset", &keys.offset)?;
            table.refuse("size", &keys.size)?;
            BridgeConfig::Ivshmem {
                function: keys.function,
            }
        }
        NtbKind::Pci => BridgeConfig::Pci {
            function: keys.function,
            bar: table.require("bar", keys.bar)?,
            offset: value(keys.offset),
            size: table.require("size", keys.size)?,
        },
    };
    Ok(WindowConfig {
        name: keys.name,
        borrowers: keys.borrowers,
        bridge,
        shows: keys.shows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_is_lent_and_to_whom() {
        let config = Config::parse(
            r#"
            name = "rack1"
            listen = ["unix:/run/farlane/lend.sock", "tls:0.0.0.0:7411"]
            term-seconds = 2

            [tls]
            certificate = "rack1.pem"
            key = "rack1.key"
            authorities = "ca.pem"

            [[device]]
            name = "scratch"
            source = "nvme"
            namespace = [{ file = "/srv/scratch.img" }, { null = "1T" }]
            doorbells = "shared"
            block = 4096

            [[device]]
            name = "gpu0"
            source = "gpu"
            memory = "64M"

            [[device]]
            name = "nvme0"
            source = "vfio"
            function = "0000:01:00.0"
            borrowers = ["rack2", "rack3"]

            [[window]]
            name = "ram"
            borrowers = ["rack2"]
            ntb = "ivshmem"
            function = "0000:00:05.0"

            [[window]]
            name = "gpu"
            borrowers = ["rack1-vm7"]
            ntb = "pci"
            function = "0000:02:00.0"
            bar = 2
            size = "256M"
            shows = { lender = "rack2", address = "unix:/rack2", device = "gpu0", bar = 2 }

            [[user]]
            uid = 1001
            names = ["vm7"]
            "#,
        )
        .unwrap();
        assert_eq!(config.listen.len(), 2);
        assert_eq!(config.devices[2].borrowers, ["rack2", "rack3"]);
        let SourceConfig::Gpu(gpu) = &config.devices[1].source else {
            panic!("not a GPU");
        };
        assert_eq!(gpu.memory, Some(Size(64 << 20)));
        assert_eq!(config.windows[0].shows, None);
        let shows = config.windows[1].shows.as_ref().unwrap();
        assert_eq!((&*shows.device, shows.bar), ("gpu0", 2));
        let SourceConfig::Nvme(nvme) = &config.devices[0].source else {
            panic!("not an NVMe controller");
        };
        assert_eq!(nvme.namespaces[1], Backing::Null(Size(1 << 40)));
        assert_eq!(nvme.block, BlockBytes::B4096);
        assert_eq!(
            (config.users[0].uid, &*config.users[0].names),
            (1001, &["vm7".to_owned()][..])
        );
    }

    #[test]
    fn the_configuration_to_start_from_is_one() {
        let text = include_str!("../../../qemu-configs/lend.toml");
        assert_eq!(Config::parse(text).unwrap().devices.len(), 3);
    }

    /// What is said of `text`, whose lines begin with 1.
    fn refusal(text: &str) -> String {
        Config::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn mistakes_in_a_file_are_told() {
        for text in [
            "listen = [\"tcp:0.0.0.0:1\"]",
            "[[device]]\nname = \"a\"\nsource = \"floppy\"",
            "[[device]]\nname = \"a\"\nsource = \"vfio\"\nfunction = \"01:00.0\"",
            "[[device]]\nname = \"a\"\nsource = \"nvme\"\nblock = 513",
            "[[device]]\nname = \"a\"\nsource = \"gpu\"\nmemory = \"much\"",
            "[[window]]\nname = \"a\"\nntb = \"ivshmem\"\nfunction = \"0000:01:00.0\"",
        ] {
            assert!(refusal(text).contains("line "), "{text}");
        }
    }

    #[test]
    fn what_has_one_name_is_there_once() {
        let device = "[[device]]\nname = \"a\"\nsource = \"gpu\"\n";
        let window = "[[window]]\nname = \"w\"\nborrowers = []\nntb = \"ivshmem\"\n\
                      function = \"0000:00:04.0\"\n";
        let user = "[[user]]\nuid = 7\nnames = []\n";
        for (table, what) in [
            (device, "devices a"),
            (window, "windows w"),
            (user, "users 7"),
        ] {
            assert!(Config::parse(table).is_ok());
            assert_eq!(refusal(&table.repeat(2)), format!("There are two {what}"));
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_wherever_it_stands() {
        let nvme = "name = \"a\"\nsource = \"nvme\"\nnamespace = [{ null = \"1G\" }]";
        let gpu = "name = \"a\"\nsource = \"gpu\"";
        let vfio = "name = \"a\"\nsource = \"vfio\"\nfunction = \"0000:01:00.0\"";
        let window = "name = \"a\"\nborrowers = []\nfunction = \"0000:01:00.0\"";
        for (text, line, key) in [
            ("lisden = []".to_owned(), 1, "lisden"),
            (
                "[[user]]\nuid = 1\nnames = []\nname = \"a\"".to_owned(),
                4,
                "name",
            ),
            (
                "[tls]\ncertificate = \"a\"\nkey = \"b\"\nauthorities = \"c\"\ncrl = \"d\""
                    .to_owned(),
                5,
                "crl",
            ),
            (
                format!("[[device]]\n{nvme}\nborrower = [\"b\"]"),
                5,
                "borrower",
            ),
            (
                format!("[[device]]\n{gpu}\nborrower = [\"b\"]"),
                4,
                "borrower",
            ),
            (
                format!("[[device]]\n{vfio}\nborrower = [\"b\"]"),
                5,
                "borrower",
            ),
            (
                format!("[[device]]\n{gpu}\n[[device]]\nborrower = [\"b\"]\n{gpu}"),
                5,
                "borrower",
            ),
            (
                "[[device]]\nname = \"a\"\nsource = \"nvme\"\nnamespace = [{ files = \"/a\" }]"
                    .to_owned(),
                4,
                "files",
            ),
            (
                format!("[[window]]\n{window}\nntb = \"ivshmem\"\nborrower = []"),
                6,
                "borrower",
            ),
            (
                format!("[[window]]\n{window}\nntb = \"ivshmem\"\nshows = {{ lendr = \"b\" }}"),
                6,
                "lendr",
            ),
            (
                format!("[[window]]\n{window}\nntb = \"pci\"\nsise = \"1G\""),
                6,
                "sise",
            ),
        ] {
            let said = refusal(&text);
            let at = format!("line {line}, ");
            assert!(said.contains(&at) && said.contains(key), "{text}\n{said}");
        }
    }

    #[test]
    fn a_key_of_another_kind_of_table_is_refused_and_a_missing_one_asked_for() {
        let named = |kind: &str, rest: &str| {
            format!("[[device]]\nname = \"a\"\nsource = \"{kind}\"\n{rest}")
        };
        let window = |kind: &str, rest: &str| {
            format!(
                "\n[[window]]\nname = \"w\"\nborrowers = []\nfunction = \"0000:01:00.0\"\n\
                 ntb = \"{kind}\"\n{rest}"
            )
        };
        for (text, said) in [
            (
                named("gpu", "serial = \"1\""),
                "Line 4: `serial` is not a key of a device with the source gpu",
            ),
            (
                named("gpu", "memory = \"1M\"\nread-only = false"),
                "Line 5: `read-only`",
            ),
            (
                named("nvme", "namespace = []\nmemory = \"1M\""),
                "Line 5: `memory`",
            ),
            (
                named("vfio", "function = \"0000:01:00.0\"\nqueues = 1"),
                "Line 5: `queues`",
            ),
            (
                named("vfio", ""),
                "Line 1: a device with the source vfio needs the key `function`",
            ),
            (
                named("nvme", ""),
                "Line 1: a device with the source nvme needs the key `namespace`",
            ),
            (
                window("ivshmem", "bar = 0"),
                "Line 7: `bar` is not a key of a window with the ntb ivshmem",
            ),
            (
                window("pci", "bar = 0"),
                "Line 2: a window with the ntb pci needs the key `size`",
            ),
        ] {
            assert!(
                refusal(&text).starts_with(said),
                "{text}\n{}",
                refusal(&text)
            );
        }
    }
}
