//! Options of the form `key=value,key=value`, and what they have in common.

use crate::access::Access;
use crate::listener::{Kind, ListenError, Listener};
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::path::PathBuf;
use thiserror::Error;

/// Why such an option cannot be followed.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum KeysError {
    /// A key that comes twice, or something that must be one thing's own, for two.
    #[error("{0} is given twice")]
    Twice(String),
    /// A key is missing.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A key that is not known, or that has no value.
    #[error("{0:?} is not known here")]
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

/// What a value was parsed to, which should have been something `wanted`.
///
/// # Errors
/// It is not.
pub fn value<T>(value: &str, wanted: &'static str, parsed: Option<T>) -> Result<T, KeysError> {
    parsed.ok_or_else(|| KeysError::Value {
        value: value.to_owned(),
        wanted,
    })
}

/// A number of bytes: decimal or, after 0x, hexadecimal, with K, M, G or T (powers of 1024) after
/// it.
#[must_use]
pub fn bytes(text: &str) -> Option<u64> {
    let units = [
        (['K', 'k'], 10),
        (['M', 'm'], 20),
        (['G', 'g'], 30),
        (['T', 't'], 40),
    ];
    let unit = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix(*unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    let number = match digits.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => digits.parse().ok()?,
    };
    number.checked_mul(1 << shift)
}

/// What is switched on or off.
#[must_use]
pub fn switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// The keys of one option. Each that is known is taken; [`finish`](Self::finish) refuses others.
#[derive(Debug)]
pub struct Keys {
    /// Those that are not taken yet: a key and its value, if it has one.
    words: Vec<(String, Option<String>)>,
    taken: Vec<&'static str>,
}

impl Keys {
    /// Splits at commas; two commas are one in a value, as in QEMU's options.
    #[must_use]
    pub fn split(text: &str) -> Self {
        let mut words = vec![String::new()];
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            if character == ',' && characters.next_if_eq(&',').is_none() {
                words.push(String::new());
            } else if let Some(word) = words.last_mut() {
                word.push(character);
            }
        }
        let pair = |word: String| match word.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        Self {
            words: words.into_iter().map(pair).collect(),
            taken: Vec::new(),
        }
    }

    /// As [`split`](Self::split), where the first word is no key: that word, and the keys.
    #[must_use]
    pub fn split_first(text: &str) -> (String, Self) {
        let mut keys = Self::split(text);
        let (first, value) = keys.words.remove(0);
        let first = value.map_or(first.clone(), |value| format!("{first}={value}"));
        (first, keys)
    }

    /// All of them, whatever they are: of each what is said of it, in order.
    #[must_use]
    pub fn all(self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::<_, String>::new();
        for (key, value) in self.words {
            let said = all.entry(key).or_default();
            if !said.is_empty() {
                said.push(',');
            }
            said.push_str(&value.unwrap_or_default());
        }
        all
    }

    /// The value of a key, where it is there.
    pub fn take(&mut self, key: &'static str) -> Option<String> {
        self.taken.push(key);
        let is_it = |(k, value): &(String, Option<String>)| {
            k == key && value.as_ref().is_some_and(|value| !value.is_empty())
        };
        let at = self.words.iter().position(is_it)?;
        self.words.remove(at).1
    }

    /// The values of keys that may come several times, in order.
    pub fn take_all(&mut self, keys: &[&'static str]) -> Vec<(&'static str, String)> {
        let mut values = Vec::new();
        self.words.retain(|(k, value)| {
            let key = keys.iter().find(|key| *key == k);
            match (key, value) {
                (Some(key), Some(value)) if !value.is_empty() => values.push((*key, value.clone())),
                _ => return true,
            }
            false
        });
        values
    }

    /// The value of a key as something `wanted`, where it is there.
    ///
    /// # Errors
    /// `parse` does not take it.
    pub fn parse<T>(
        &mut self,
        key: &'static str,
        wanted: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, KeysError> {
        let given = self.take(key);
        let parsed = given.map(|given| value(&given, wanted, parse(&given)));
        parsed.transpose()
    }

    /// Where a VMM connects: `socket=PATH` or `fd=N`.
    ///
    /// # Errors
    /// Both are there, or the descriptor is no number.
    pub fn socket(&mut self) -> Result<Option<SocketOption>, KeysError> {
        let path = self
            .take("socket")
            .map(|path| SocketOption::Path(path.into()));
        let fd = self.parse("fd", "the number of a descriptor", |fd| fd.parse().ok())?;
        match (path, fd.map(SocketOption::Descriptor)) {
            (Some(_), Some(_)) => Err(KeysError::Twice("The socket".to_owned())),
            (path, fd) => Ok(path.or(fd)),
        }
    }

    /// All that are known are taken.
    ///
    /// # Errors
    /// There are others, or one twice.
    pub fn finish(self) -> Result<(), KeysError> {
        let Some((key, value)) = self.words.into_iter().next() else {
            return Ok(());
        };
        Err(match value {
            Some(value) if !value.is_empty() && self.taken.contains(&&*key) => {
                KeysError::Twice(key)
            }
            Some(value) => KeysError::Unknown(format!("{key}={value}")),
            None => KeysError::Unknown(key),
        })
    }
}

/// Finds a value that is there twice.
///
/// # Errors
/// There is one.
pub fn all_different(mut values: Vec<String>) -> Result<(), KeysError> {
    values.sort();
    match values.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(KeysError::Twice(pair[0].clone())),
        None => Ok(()),
    }
}

/// Where a VMM connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketOption {
    /// A socket to make.
    Path(PathBuf),
    /// A listening socket that whoever starts the backend has made.
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

impl SocketOption {
    /// From the options `--socket-path` and `--fd`, which exclude each other.
    ///
    /// # Errors
    /// Neither is given.
    pub fn of(path: Option<&PathBuf>, fd: Option<RawFd>) -> Result<Self, KeysError> {
        let path = path.map(|path| Self::Path(path.clone()));
        path.or(fd.map(Self::Descriptor))
            .ok_or(KeysError::Missing("--socket-path or --fd"))
    }

    /// Takes over the socket if it is inherited. To be called before anything else is opened: a
    /// wrong number is noticed then.
    ///
    /// # Errors
    /// It is no such socket.
    pub fn inherit(&self) -> Result<Socket, ListenError> {
        Ok(match self {
            Self::Path(path) => Socket::ToMake(path.clone()),
            Self::Descriptor(fd) => Socket::Inherited(Listener::inherit(*fd, Kind::Stream)?),
        })
    }

    /// As [`inherit`](Self::inherit), all of them.
    ///
    /// # Errors
    /// One is no such socket.
    pub fn inherit_all<'a>(
        options: impl IntoIterator<Item = &'a Self>,
    ) -> Result<Vec<Socket>, ListenError> {
        options.into_iter().map(Self::inherit).collect()
    }
}

/// A socket for VMMs, not listened at yet.
#[derive(Debug)]
pub enum Socket {
    /// To be made here.
    ToMake(PathBuf),
    /// There already.
    Inherited(Listener),
}

impl Socket {
    /// Listens. To be called when there is something behind the socket.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn listen(self, access: &Access) -> Result<Listener, ListenError> {
        match self {
            Self::ToMake(path) => Listener::bind(&path, Kind::Stream, access),
            Self::Inherited(listener) => Ok(listener),
        }
    }

    /// Listens at all of them.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn listen_all(sockets: Vec<Self>, access: &Access) -> Result<Vec<Listener>, ListenError> {
        sockets.into_iter().map(|s| s.listen(access)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_up_to_tebibytes() {
        let all = [
            ("512", Some(512)),
            ("0x10", Some(16)),
            ("4K", Some(4 << 10)),
            ("4k", Some(4 << 10)),
            ("0x2M", Some(2 << 20)),
            ("3G", Some(3 << 30)),
            ("1T", Some(1 << 40)),
            ("16777216T", None),
            ("", None),
            ("G", None),
            ("1P", None),
            ("-1K", None),
        ];
        for (text, number) in all {
            assert_eq!(bytes(text), number, "{text}");
        }
    }

    #[test]
    fn two_commas_are_one_in_a_value() {
        let mut keys = Keys::split("path=/a,,b,name=c=d");
        assert_eq!(keys.take("path").as_deref(), Some("/a,b"));
        assert_eq!(keys.take("name").as_deref(), Some("c=d"));
        keys.finish().unwrap();
        let (first, keys) = Keys::split_first("a=,,b");
        assert_eq!((first.as_str(), keys.finish()), ("a=,b", Ok(())));
    }

    #[test]
    fn what_is_not_taken_is_refused() {
        let refusal = |text: &str| {
            let mut keys = Keys::split(text);
            let _ = keys.take("a");
            keys.finish().unwrap_err()
        };
        let unknown = |text: &str| KeysError::Unknown(text.to_owned());
        assert_eq!(refusal("a=1,a=2"), KeysError::Twice("a".to_owned()));
        for text in ["", "a", "a=", "b=1", "flag=", "=1"] {
            assert_eq!(refusal(text), unknown(text), "{text}");
        }
        assert_eq!(refusal("flag,flag"), unknown("flag"));
    }

    #[test]
    fn values_that_come_several_times_are_in_order() {
        let mut keys = Keys::split("b=1,a=2,c=3,b=4,b=");
        let values = keys.take_all(&["a", "b"]);
        let values: Vec<_> = values.iter().map(|(k, v)| (*k, v.as_str())).collect();
        assert_eq!(values, [("b", "1"), ("a", "2"), ("b", "4")]);
        assert_eq!(keys.take("c").as_deref(), Some("3"));
        assert_eq!(keys.finish(), Err(KeysError::Unknown("b=".to_owned())));
    }

    #[test]
    fn a_socket_is_a_path_or_a_descriptor() {
        let socket = |text: &str| Keys::split(text).socket();
        assert_eq!(
            socket("socket=/s"),
            Ok(Some(SocketOption::Path("/s".into())))
        );
        assert_eq!(socket("fd=7"), Ok(Some(SocketOption::Descriptor(7))));
        assert_eq!(socket("path=/s"), Ok(None));
        assert!(socket("fd=x").is_err() && socket("fd=3,socket=/s").is_err());
    }
}
