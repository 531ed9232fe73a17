//! The configuration file: the options of a daemon's command line by their names, as TOML.
//!
//! A key is the name of an option, without the dashes. A flag is `true` or `false`; an option that
//! may come several times takes an array, or an array of tables; one of several keys takes a table
//! of these, where a word without a key has the name that `--help` gives it, in small letters.
//!
//! ```toml
//! read-only = true
//! metrics = "/run/farlane/vm0.metrics"
//!
//! [[disk]]
//! socket = "/run/farlane/vm0.sock"
//! path = "/srv/vm0.img"
//! ```
//!
//! It is turned into words of the command line, so that both are read by one parser and can say the
//! same; where both have an option that comes once, that of the command line holds.

use crate::keys::Keys;
use crate::logging;
use clap::error::{ContextKind, ContextValue};
use clap::{ArgAction, ArgMatches, Command, Parser};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use thiserror::Error;
use toml::de::{DeTable, DeValue};

/// Options that are of the command line alone.
const NOT_IN_FILES: [&str; 5] = ["config", "check", "help", "version", "print-capabilities"];

/// Why there are no options.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The words of the command line are wrong, or it only asks for help.
    #[error(transparent)]
    Words(#[from] Box<clap::Error>),
    /// The file cannot be read.
    #[error("Cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Its text is no TOML.
    #[error("{}: {error}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line and error.
        error: Box<toml::de::Error>,
    },
    /// Something in it is not as it should be.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// What is wrong.
        what: String,
    },
}

/// An option of a file.
struct Entry {
    /// Its name, without dashes.
    option: String,
    line: usize,
    /// Its value, where it takes one.
    value: Option<String>,
}

impl Entry {
    /// In one word: a value may begin with dashes.
    fn word(&self) -> OsString {
        let name = format!("--{}", self.option);
        match &self.value {
            Some(value) => format!("{name}={value}").into(),
            None => name.into(),
        }
    }
}

/// Options of every daemon that a file may have ([`DaemonOptions`](crate::options::DaemonOptions)).
const COMMON: [&str; 5] = [
    "metrics",
    "socket-group",
    "socket-mode",
    "seccomp",
    "log-level",
];

/// The options of this program: those of its command line, and of the file that it names. Ends the
/// program where they are wrong, or it is only asked for help.
#[must_use]
pub fn parse<O: Parser>() -> O {
    or_end::<O, _>(parse_from(std::env::args_os().collect()))
}

/// The same of a program whose file says other things besides: of the file the options of every
/// daemon are taken, and the rest is the program's to read.
#[must_use]
pub fn parse_common<O: Parser>() -> O {
    let words = std::env::args_os().collect();
    or_end::<O, _>(parse_some(words, |option| COMMON.contains(&option)))
}

pub(crate) fn or_end<O: Parser, T>(parsed: Result<T, ConfigError>) -> T {
    match parsed {
        Ok(options) => options,
        Err(ConfigError::Words(error)) => error.exit(),
        Err(error) => {
            let error = anyhow::Error::from(error);
            logging::print_failure(O::command().get_name(), &error);
            std::process::exit(2)
        }
    }
}

/// The same of these words, the first of which is the program's name.
///
/// # Errors
/// See [`ConfigError`].
pub fn parse_from<O: Parser>(words: Vec<OsString>) -> Result<O, ConfigError> {
    parse_some(words, |_| true)
}

/// Options, and what was said of each.
#[derive(Debug)]
pub(crate) struct Said<O> {
    /// The options.
    pub options: O,
    /// Of each option by its name, as often as it comes, its keys; a value that has none is one of
    /// the key "".
    pub values: BTreeMap<String, Vec<BTreeMap<String, String>>>,
    /// Lines of the file that have options, by these, in the order of the values.
    lines: BTreeMap<String, Vec<usize>>,
    file: Option<PathBuf>,
}

impl<O> Said<O> {
    /// Where the file says it, if it does: that option, as often as it came before.
    pub fn place(&self, option: &str, index: usize) -> Option<String> {
        let line = self.lines.get(option)?.get(index)?;
        Some(format!("{}:{line}", self.file.as_ref()?.display()))
    }
}

/// As [`parse_from`], with what was said; of this file in place of the one that the words name.
///
/// # Errors
/// See [`ConfigError`].
pub(crate) fn said<O: Parser>(
    words: Vec<OsString>,
    file: Option<&Path>,
) -> Result<Said<O>, ConfigError> {
    let mut command = O::command();
    command.build();
    let file = file.map(Path::to_owned);
    let file = file.or_else(|| named_file(&command, &words));
    let (words, entries) = match &file {
        Some(path) => with_file(&command, words, path, |_| true)?,
        None => (words, Vec::new()),
    };
    let parse = || {
        let matches = O::command().try_get_matches_from(words)?;
        let values = values(&command, &matches);
        Ok((O::from_arg_matches(&matches)?, values))
    };
    let (options, values) = parse().map_err(|error| match &file {
        Some(path) => located(error, path, &entries),
        None => Box::new(error).into(),
    })?;
    let mut lines = BTreeMap::<_, Vec<_>>::new();
    for Entry { option, line, .. } in entries {
        lines.entry(option).or_default().push(line);
    }
    Ok(Said {
        options,
        values,
        lines,
        file,
    })
}

/// What is said of each option that a file may have, its default included.
fn values(
    command: &Command,
    matches: &ArgMatches,
) -> BTreeMap<String, Vec<BTreeMap<String, String>>> {
    let long = |arg: &clap::Arg| Some((arg.get_long()?.to_owned(), arg.clone()));
    let named = command.get_arguments().filter_map(long);
    let named = named.filter(|(name, _)| !NOT_IN_FILES.contains(&name.as_str()));
    let keys = |arg: &clap::Arg, text: &str| {
        let names = arg.get_value_names().unwrap_or_default();
        let first = first_word(arg);
        match (names.iter().any(|name| name.contains('=')), first) {
            (false, _) => BTreeMap::from([(String::new(), text.to_owned())]),
            (true, Some(first)) if !first.is_optional => {
                let (word, keys) = Keys::split_first(text);
                let mut keys = keys.all();
                keys.insert(first.name, word);
                keys
            }
            (true, _) => Keys::split(text).all(),
        }
    };
    let said = named.map(|(name, arg)| {
        let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
        let said = raw.map(|raw| keys(&arg, &raw.to_string_lossy()));
        (name, said.collect())
    });
    said.collect()
}

/// The same, of which the file's options are those that are `taken`.
fn parse_some<O: Parser>(
    words: Vec<OsString>,
    taken: impl Fn(&str) -> bool,
) -> Result<O, ConfigError> {
    let mut command = O::command();
    command.build();
    let Some(path) = named_file(&command, &words) else {
        return Ok(O::try_parse_from(words).map_err(Box::new)?);
    };
    let (words, entries) = with_file(&command, words, &path, taken)?;
    O::try_parse_from(words).map_err(|error| located(error, &path, &entries))
}

/// The words with those of a file, which come before them, and its options.
fn with_file(
    command: &Command,
    words: Vec<OsString>,
    path: &Path,
    taken: impl Fn(&str) -> bool,
) -> Result<(Vec<OsString>, Vec<Entry>), ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_owned(),
        source,
    })?;
    let mut entries = entries(command, path, &text, taken)?;
    entries.retain(|entry| may_repeat(command, &entry.option) || !is_given(&words, &entry.option));
    let (program, others) = words.split_at(words.len().min(1));
    let of_file = entries.iter().map(Entry::word);
    let all = program.iter().cloned().chain(of_file);
    let all = all.chain(others.iter().cloned()).collect();
    Ok((all, entries))
}

/// An error with the line of the file that has the value that is wrong.
fn located(error: clap::Error, path: &Path, entries: &[Entry]) -> ConfigError {
    let wrong = match error.get(ContextKind::InvalidValue) {
        Some(ContextValue::String(wrong)) => Some(wrong),
        _ => None,
    };
    let its = |entry: &&Entry| wrong.is_some() && entry.value.as_ref() == wrong;
    match entries.iter().find(its) {
        None => Box::new(error).into(),
        Some(entry) => {
            let text = error.to_string();
            let what = text.lines().next().unwrap_or_default();
            ConfigError::Line {
                path: path.to_owned(),
                line: entry.line,
                what: what.strip_prefix("error: ").unwrap_or(what).to_owned(),
            }
        }
    }
}

/// The file that the words name. That of a command that asks a running daemon is another one's.
fn named_file(command: &Command, words: &[OsString]) -> Option<PathBuf> {
    let asks = words.get(1).and_then(|word| word.to_str());
    if asks.is_some_and(|word| command.find_subcommand(word).is_some()) {
        return None;
    }
    let mut words = words.iter().skip(1);
    while let Some(word) = words.next() {
        if word == "--config" {
            return words.next().map(PathBuf::from);
        }
        let word = word.to_str().unwrap_or_default();
        if let Some(path) = word.strip_prefix("--config=") {
            return Some(path.into());
        }
    }
    None
}

fn is_given(words: &[OsString], option: &str) -> bool {
    words.iter().filter_map(|word| word.to_str()).any(|word| {
        let name = word.split_once('=').map_or(word, |(name, _)| name);
        name.strip_prefix("--") == Some(option)
    })
}

fn may_repeat(command: &Command, option: &str) -> bool {
    argument(command, option).is_some_and(|arg| matches!(arg.get_action(), ArgAction::Append))
}

fn argument<'a>(command: &'a Command, option: &str) -> Option<&'a clap::Arg> {
    let is_it = |arg: &&clap::Arg| arg.get_long() == Some(option);
    let known = command.get_arguments().find(is_it);
    known.filter(|_| !NOT_IN_FILES.contains(&option))
}

/// The options of a file.
fn entries(
    command: &Command,
    path: &Path,
    text: &str,
    taken: impl Fn(&str) -> bool,
) -> Result<Vec<Entry>, ConfigError> {
    let table = DeTable::parse(text).map_err(|error| ConfigError::Toml {
        path: path.to_owned(),
        error: Box::new(error),
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.get_ref() {
        let option = key.get_ref().to_string();
        if !taken(&option) {
            continue;
        }
        let at = |offset: usize| text[..offset].matches('\n').count() + 1;
        let refuse = |offset: usize, what: String| ConfigError::Line {
            path: path.to_owned(),
            line: at(offset),
            what,
        };
        let begin = key.span().start;
        let arg = argument(command, &option)
            .ok_or_else(|| refuse(begin, format!("`{option}` is not an option")))?;
        let mut add = |offset: usize, value: Option<String>| {
            entries.push(Entry {
                option: option.clone(),
                line: at(offset),
                value,
            });
        };
        if !arg.get_action().takes_values() {
            match value.get_ref() {
                DeValue::Boolean(true) => add(begin, None),
                DeValue::Boolean(false) => {}
                _ => return Err(refuse(begin, format!("`{option}` is true or false"))),
            }
            continue;
        }
        let first = first_word(arg);
        let is_mode = arg.get_value_names().is_some_and(|names| names == ["MODE"]);
        let mut one = |value: &toml::Spanned<DeValue<'_>>| -> Result<(), ConfigError> {
            // Of a table, the span begins at its head.
            let offset = match value.get_ref() {
                DeValue::Table(_) => value.span().start,
                _ => begin.max(value.span().start),
            };
            let said = match value.get_ref() {
                DeValue::Table(keys) => joined(keys, first.as_ref()),
                other => scalar(other, is_mode),
            };
            let said =
                said.ok_or_else(|| refuse(offset, format!("`{option}` is no such value")))?;
            add(offset, Some(said));
            Ok(())
        };
        match value.get_ref() {
            DeValue::Array(all) => all.iter().try_for_each(&mut one)?,
            _ => one(value)?,
        }
    }
    Ok(entries)
}

/// The first word of an option's value, where that is no key.
struct FirstWord {
    /// What a file calls it: `path` of `PATH[,user=USER]...`.
    name: String,
    /// There may be none, as in `PATH|dev=PATH`.
    is_optional: bool,
}

fn first_word(arg: &clap::Arg) -> Option<FirstWord> {
    let form = arg.get_value_names()?.first()?;
    let name: String = form.chars().take_while(char::is_ascii_uppercase).collect();
    (!name.is_empty()).then(|| FirstWord {
        name: name.to_ascii_lowercase(),
        is_optional: form[name.len()..].starts_with('|'),
    })
}

/// A table as the option has it: `key=value,key=value`, in which two commas are one.
fn joined(keys: &DeTable<'_>, first: Option<&FirstWord>) -> Option<String> {
    let (mut words, mut has_first) = (Vec::new(), false);
    for (key, value) in keys {
        let key = key.get_ref();
        let values = match value.get_ref() {
            DeValue::Array(all) => all.iter().map(|one| one.get_ref()).collect(),
            other => vec![other],
        };
        for value in values {
            let value = scalar(value, false)?.replace(',', ",,");
            if first.is_some_and(|first| first.name == **key) {
                has_first = true;
                words.insert(0, value);
            } else {
                words.push(format!("{key}={value}"));
            }
        }
    }
    // Else another word would be taken for it.
    let is_whole = first.is_none_or(|first| has_first || first.is_optional);
    is_whole.then(|| words.join(","))
}

/// A value that is one word. Numbers are decimal there, but modes, which are octal.
fn scalar(value: &DeValue<'_>, is_mode: bool) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if is_mode => {
            let text = number.to_string();
            Some(text.strip_prefix("0o").unwrap_or(&text).to_owned())
        }
        DeValue::Integer(number) => {
            let number = i128::from_str_radix(number.as_str(), number.radix());
            number.ok().map(|number| number.to_string())
        }
        DeValue::Float(number) => Some(number.to_string()),
        DeValue::Boolean(true) => Some("on".to_owned()),
        DeValue::Boolean(false) => Some("off".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeysError;

    #[derive(Clone, Debug, PartialEq, Eq)]
    struct Disk {
        socket: String,
        path: Option<String>,
        peers: Vec<String>,
    }

    impl std::str::FromStr for Disk {
        type Err = KeysError;

        fn from_str(text: &str) -> Result<Self, KeysError> {
            let mut keys = Keys::split(text);
            let socket = keys.take("socket").ok_or(KeysError::Missing("socket"))?;
            let path = keys.take("path");
            let peers = keys.take_all(&["peer"]).into_iter().map(|(_, peer)| peer);
            let peers = peers.collect();
            keys.finish()?;
            Ok(Self {
                socket,
                path,
                peers,
            })
        }
    }

    /// A daemon
    #[derive(Debug, Parser)]
    #[command(name = "daemon")]
    struct Options {
        #[arg(long, value_name = "socket=PATH,path=PATH")]
        disk: Vec<Disk>,
        #[arg(long, value_name = "PATH[,user=USER]...")]
        host_socket: Option<String>,
        #[arg(long)]
        read_only: bool,
        #[arg(long, default_value_t = 1)]
        workers: u8,
        #[arg(long, value_name = "MODE")]
        mode: Option<String>,
        #[arg(long)]
        config: Option<PathBuf>,
    }

    fn with(text: &str, words: &[&str]) -> Result<Options, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let all = ["daemon", "--config", file.path().to_str().unwrap()];
        let all = all.iter().chain(words).map(OsString::from).collect();
        parse_from(all).map_err(|error| {
            let error = format!("{:#}", anyhow::Error::from(error));
            error.replace(file.path().to_str().unwrap(), "FILE")
        })
    }

    #[test]
    fn a_file_says_what_the_command_line_says() {
        let text = r#"
            read-only = true
            workers = 3
            host-socket = { path = "/h", user = ["a", "b"] }

            [[disk]]
            socket = "/s"
            path = "/f,g"

            [[disk]]
            socket = "/t"
            peer = ["x", "y"]
        "#;
        let options = with(text, &[]).unwrap();
        assert!(options.read_only && options.config.is_some());
        assert_eq!(options.workers, 3);
        assert_eq!(options.host_socket.as_deref(), Some("/h,user=a,user=b"));
        let disk = |socket: &str, path: Option<&str>, peers: &[&str]| Disk {
            socket: socket.to_owned(),
            path: path.map(str::to_owned),
            peers: peers.iter().map(|&peer| peer.to_owned()).collect(),
        };
        let both = [disk("/s", Some("/f,g"), &[]), disk("/t", None, &["x", "y"])];
        assert_eq!(options.disk, both);
        // What comes once is the command line's, what may be repeated is added.
        let options = with(text, &["--workers=4", "--disk", "socket=/u"]).unwrap();
        assert_eq!((options.workers, options.disk.len()), (4, 3));
        let options = with("workers = 0x10\nmode = 0o660", &[]).unwrap();
        assert_eq!(
            (options.workers, options.mode.as_deref()),
            (16, Some("660"))
        );
        let options = with("read-only = false", &[]).unwrap();
        assert!(!options.read_only && options.workers == 1);
    }

    #[test]
    fn what_was_said_is_told_by_keys_and_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "read-only = true\nhost-socket = { path = '/h', user = ['a', 'b'] }\n\
                    [[disk]]\nsocket = '/s'\n[[disk]]\nsocket = '/t'\npath = '/f,g'\n";
        std::fs::write(file.path(), text).unwrap();
        // The file that is given comes before the one that the words name.
        let words = ["daemon", "--config=/nowhere/at all", "--disk", "socket=/u"];
        let words = words.map(OsString::from).into();
        let said = said::<Options>(words, Some(file.path())).unwrap();
        let keys = |keys: &[(&str, &str)]| -> BTreeMap<String, String> {
            let both = keys.iter();
            both.map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect()
        };
        assert_eq!(said.values["read-only"], [keys(&[("", "true")])]);
        assert_eq!(said.values["workers"], [keys(&[("", "1")])]);
        let host = keys(&[("path", "/h"), ("user", "a,b")]);
        assert_eq!(said.values["host-socket"], [host]);
        let second = keys(&[("socket", "/t"), ("path", "/f,g")]);
        assert_eq!(
            (said.values["disk"].len(), &said.values["disk"][1]),
            (3, &second)
        );
        assert!(!said.values.contains_key("config") && said.values["mode"].is_empty());
        let place = |index| said.place("disk", index);
        let line = |line| Some(format!("{}:{line}", file.path().display()));
        assert_eq!((place(0), place(1), place(2)), (line(3), line(5), None));
        // A program that asks has another one's file.
        let command = Command::new("daemon").subcommand(Command::new("reload"));
        let words = |all: &[&str]| all.iter().map(OsString::from).collect::<Vec<_>>();
        let named = |all: &[&str]| named_file(&command, &words(all));
        assert_eq!(named(&["daemon", "reload", "--config", "/f"]), None);
        assert_eq!(named(&["daemon", "--config", "/f"]), Some("/f".into()));
    }

    #[test]
    fn what_is_wrong_is_told_by_name_and_line() {
        for (text, said) in [
            ("\nworker = 3\n", "FILE:2: `worker` is not an option"),
            ("config = 'x'", "FILE:1: `config` is not an option"),
            ("check = true", "FILE:1: `check` is not an option"),
            ("read-only = 'yes'", "FILE:1: `read-only` is true or false"),
            (
                "# first\n\nworkers = 300",
                "FILE:3: invalid value '300' for '--workers <WORKERS>': 300 is not in 0..=255",
            ),
            (
                "[[disk]]\nsocket = '/s'\n\n[[disk]]\nsocket = '/t'\ncolour = 'blue'",
                "FILE:4: invalid value 'colour=blue,socket=/t' for '--disk \
                 <socket=PATH,path=PATH>': \"colour=blue\" is not known here",
            ),
            ("disk = [1979-05-27]", "FILE:1: `disk` is no such value"),
            (
                "host-socket = { user = 'a' }",
                "FILE:1: `host-socket` is no such value",
            ),
        ] {
            assert_eq!(with(text, &[]).map(drop), Err(said.to_owned()), "{text}");
        }
        let error = with("workers = ", &[]).unwrap_err();
        assert!(
            error.starts_with("FILE: TOML parse error at line 1"),
            "{error}"
        );
        let missing = ["daemon", "--config=/nowhere/at all"].map(OsString::from);
        let error = parse_from::<Options>(missing.into()).unwrap_err();
        assert_eq!(error.to_string(), "Cannot read /nowhere/at all");
    }
}
