//! Options that a running daemon follows anew, from its configuration file as it is now.
//!
//! A daemon is confined and opens no file any more. So its own program reads the file (`reload`),
//! by the words with which the daemon was started and the code that read them then, and tells the
//! daemon over its control socket what may change ([`Reloadable::CHANGEABLE`]), and what was said
//! of all else. Where that is not what the daemon was started with, all of it is refused.

use crate::answering::{Answer, PATIENCE};
use crate::config::{self, Said};
use crate::keys::KeysError;
use crate::logging;
use crate::run::{self, Daemon};
use crate::stream::{self, Stream, late};
use crate::terminal::printable;
use anyhow::{Context as _, bail, ensure};
use log::LevelFilter;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Most bytes of an order, or of a reply: thousands of VMs with limits and peers.
const MAX_BYTES: usize = 4 << 20;
/// How long a daemon may take for a reply, where others ask it before.
const REPLY: Duration = Duration::from_secs(30);
/// What every daemon may be told anew.
const LOG_LEVEL: &str = "log-level";

/// Over what a daemon follows options anew; flattened into its arguments.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ControlOptions {
    /// UNIX socket to create, over which `reload` has this daemon follow its configuration file as
    /// it is then; for its own user and root alone
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,

    /// Ask a running daemon instead of starting one
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Requests to a running daemon.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Command {
    /// Have a running daemon follow its configuration file as it is now: all of it, or, where it
    /// cannot, nothing
    Reload {
        /// The file
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Its control socket
        #[arg(long, value_name = "PATH")]
        control: PathBuf,
    },
}

/// An option that may change, by its name, and which of its keys; all of it where there are none.
pub type Changeable = (&'static str, &'static [&'static str]);

/// A daemon that follows some of its options anew.
pub trait Reloadable: Daemon {
    /// What of the options may change, as a running daemon takes it.
    type Changes: Serialize + DeserializeOwned + Send + 'static;

    /// Which options these are, besides `log-level`.
    const CHANGEABLE: &'static [Changeable];

    /// Its control socket, and what is asked of a running daemon.
    fn control_options(options: &Self::Options) -> &ControlOptions;

    /// What of these options may change. They were [checked](Daemon::check).
    ///
    /// # Errors
    /// As of [`Daemon::check`].
    fn changes(options: &Self::Options) -> anyhow::Result<Self::Changes>;

    /// What follows changes, while the daemon serves: all of them, or, with an error that says why,
    /// none. It runs on a thread of its own, and waits for no peer. Called after
    /// [`Daemon::start`].
    fn follow(&self) -> Follow<Self::Changes>;
}

/// See [`Reloadable::follow`].
pub type Follow<C> = Box<dyn FnMut(C) -> Result<(), String> + Send>;

/// What was said of options, by their names, as often as each comes, by its keys.
type Words = BTreeMap<String, Vec<BTreeMap<String, String>>>;

/// What a daemon is asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
enum Order {
    /// The words with which it was started.
    Words,
    /// That it follows these options.
    Follow(Options),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Options {
    /// That of the program that says so.
    version: String,
    /// What may not change.
    fixed: Words,
    log_level: String,
    changes: serde_json::Value,
}

/// What it answers.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Reply {
    Words(Vec<Vec<u8>>),
    Followed,
    /// This option may not change.
    Fixed(Difference),
    Refused(String),
}

/// The first option that is not what it was.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Difference {
    option: String,
    /// How often it comes before that.
    index: usize,
    /// Its keys that differ; none where there is another number of these options.
    keys: Vec<String>,
}

impl Difference {
    fn between(ours: &Words, theirs: &Words) -> Option<Self> {
        let none = Vec::new();
        let names = ours.keys().chain(theirs.keys());
        names.into_iter().find_map(|name| {
            let of = |words: &Words| words.get(name).unwrap_or(&none).clone();
            let (ours, theirs) = (of(ours), of(theirs));
            let both = || ours.iter().zip(&theirs);
            let differs = both().position(|(a, b)| a != b);
            let keys = both().find(|(a, b)| a != b).map(|(a, b)| {
                let all = a.keys().chain(b.keys());
                let mut keys: Vec<_> = all.filter(|key| a.get(*key) != b.get(*key)).collect();
                keys.sort();
                keys.dedup();
                keys.into_iter().cloned().collect()
            });
            let index = differs.unwrap_or_else(|| ours.len().min(theirs.len()));
            (ours != theirs).then(|| Self {
                option: name.clone(),
                index,
                keys: keys.unwrap_or_default(),
            })
        })
    }

    /// What cannot change.
    fn text(&self) -> String {
        let option = printable(&self.option);
        let named = self.keys.iter().filter(|key| !key.is_empty());
        let keys: Vec<_> = named.map(|key| format!("`{}`", printable(key))).collect();
        match keys.is_empty() {
            true => format!("`{option}`"),
            false => format!("{} of `{option}`", keys.join(", ")),
        }
    }
}

/// What of all that was said may not change.
fn fixed<D: Reloadable>(said: &Words) -> Words {
    let mut fixed = said.clone();
    for (option, keys) in D::CHANGEABLE.iter().chain(&[(LOG_LEVEL, &[][..])]) {
        if keys.is_empty() {
            fixed.remove(*option);
        }
        for one in fixed.get_mut(*option).into_iter().flatten() {
            one.retain(|key, _| !keys.contains(&key.as_str()));
        }
    }
    fixed
}

/// Runs a daemon with the arguments of this program, and the configuration file that they name; or
/// asks a running one.
#[must_use]
pub fn run<D: Reloadable>() -> ExitCode {
    let words: Vec<_> = std::env::args_os().collect();
    let said = config::or_end::<D::Options, _>(config::said(words.clone(), None));
    let Said {
        options, values, ..
    } = said;
    let control = D::control_options(&options);
    if let Some(Command::Reload { config, control }) = &control.command {
        return run::exit_code::<D::Options>(reload::<D>(config, control));
    }
    let fixed = fixed::<D>(&values);
    let live = run::live::<D>(&options, control.control.as_deref(), |daemon| {
        answer(words, fixed, daemon.follow())
    });
    run::exit_code::<D::Options>(live)
}

/// Has the daemon behind a control socket follow a file.
fn reload<D: Reloadable>(file: &Path, control: &Path) -> anyhow::Result<()> {
    let ask = |order: &Order| {
        let reply = ask(control, order).map_err(late);
        reply.with_context(|| format!("Cannot ask the daemon at {}", control.display()))
    };
    let words = match ask(&Order::Words)? {
        Reply::Words(words) => words.into_iter().map(OsString::from_vec),
        other => bail!(refusal(other)),
    };
    let said = config::said::<D::Options>(words.collect(), Some(file))?;
    let options = &said.options;
    D::check(options)?;
    let order = Order::Follow(Options {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        fixed: fixed::<D>(&said.values),
        log_level: D::daemon_options(options).log_level.to_string(),
        changes: serde_json::to_value(D::changes(options)?)?,
    });
    match ask(&order)? {
        Reply::Followed => Ok(()),
        Reply::Fixed(difference) => {
            let place = said.place(&difference.option, difference.index);
            let place = place.map_or_else(String::new, |place| format!("{place}: "));
            let what = difference.text();
            bail!("{place}{what} cannot change while the daemon runs: nothing has changed")
        }
        other => bail!(refusal(other)),
    }
}

fn refusal(reply: Reply) -> String {
    match reply {
        Reply::Refused(why) => why,
        _ => "The daemon answers something else".to_owned(),
    }
}

/// Asks a daemon.
fn ask(control: &Path, order: &Order) -> io::Result<Reply> {
    let end = Instant::now() + REPLY;
    let mut stream = Stream::until(stream::connect(control, REPLY)?, end);
    // One that refuses whoever asks says so, whether or not it hears all of the question.
    let _ = send(&mut stream, order);
    let reply = stream.all(MAX_BYTES)?;
    serde_json::from_slice(&reply).map_err(|_| {
        let what = "it is no daemon that follows options";
        io::Error::new(ErrorKind::InvalidData, what)
    })
}

fn send(stream: &mut Stream, what: &impl Serialize) -> io::Result<()> {
    stream.write(&serde_json::to_vec(what)?)?;
    stream.finish()
}

/// Answers orders of root and of this process's own user.
fn answer<C: DeserializeOwned + Send + 'static>(
    words: Vec<OsString>,
    fixed: Words,
    mut follow: Follow<C>,
) -> Answer {
    Box::new(move |stream| {
        let reply = match order(stream) {
            Ok(Order::Words) => {
                let words = words.iter().map(|word| word.as_bytes().to_vec());
                Reply::Words(words.collect())
            }
            Ok(Order::Follow(options)) => match followed(options, &fixed, &mut follow) {
                Ok(reply) => reply,
                Err(e) => Reply::Refused(format!("{e:#}")),
            },
            Err(e) => Reply::Refused(format!("{e:#}")),
        };
        stream.renew(PATIENCE);
        send(stream, &reply)?;
        // One that was refused may be saying something still.
        stream.drain()
    })
}

/// What somebody asks who may.
fn order(stream: &mut Stream) -> anyhow::Result<Order> {
    let user = stream.peer_user()?;
    let is_own = user == 0 || user == rustix::process::geteuid().as_raw();
    if !is_own {
        log::warn!("A process of user {user} has asked for a reload");
        bail!("Only root and the daemon's own user may ask it");
    }
    let asked = stream.all(MAX_BYTES).context("The order cannot be read")?;
    serde_json::from_slice(&asked).context("No order")
}

/// Follows options, or says which cannot be.
fn followed<C: DeserializeOwned>(
    options: Options,
    fixed: &Words,
    follow: &mut Follow<C>,
) -> anyhow::Result<Reply> {
    let version = env!("CARGO_PKG_VERSION");
    ensure!(
        options.version == version,
        "The daemon is of version {version}, and follows options of no other one"
    );
    if let Some(difference) = Difference::between(fixed, &options.fixed) {
        log::warn!(
            "Options are refused: {} is not as it was",
            difference.text()
        );
        return Ok(Reply::Fixed(difference));
    }
    let level: LevelFilter = options.log_level.parse().context("The log level is none")?;
    let changes = serde_json::from_value(options.changes).context("Options of another daemon")?;
    follow(changes).map_err(anyhow::Error::msg)?;
    logging::set_level(level);
    log::info!("The options were told anew");
    Ok(Reply::Followed)
}

impl ControlOptions {
    /// That the control socket is none of the others, which are these.
    ///
    /// # Errors
    /// It is one of them.
    pub fn check(&self, mut others: Vec<String>) -> Result<(), KeysError> {
        others.extend(self.control.iter().map(|path| path.display().to_string()));
        crate::keys::all_different(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc;

    type Keys<'a> = &'a [(&'a str, &'a str)];

    fn words(options: &[(&str, &[Keys<'_>])]) -> Words {
        let pair = |&(key, value): &(&str, &str)| (key.to_owned(), value.to_owned());
        let one = |keys: &Keys<'_>| keys.iter().map(pair).collect();
        let all = options.iter();
        all.map(|(name, all)| ((*name).to_owned(), all.iter().map(one).collect()))
            .collect()
    }

    fn order(fixed: &Words, version: &str, level: &str) -> Options {
        Options {
            version: version.to_owned(),
            fixed: fixed.clone(),
            log_level: level.to_owned(),
            changes: 7.into(),
        }
    }

    #[test]
    fn what_differs_and_cannot_change_is_named_and_nothing_is_followed() {
        let [plain, port] = [[("", "1")], [("gid", "a")]];
        let ours = words(&[("vm", &[&port, &port]), ("workers", &[&plain])]);
        let count = Cell::new(0);
        let told = |options| {
            let (tell, hear) = mpsc::channel();
            let mut follow: Follow<u8> = Box::new(move |n| tell.send(n).map_err(|e| e.to_string()));
            let reply = followed(options, &ours, &mut follow);
            count.set(hear.try_iter().count());
            reply
        };
        let version = env!("CARGO_PKG_VERSION");
        let followed = told(order(&ours, version, "info")).unwrap();
        assert_eq!((followed, count.get()), (Reply::Followed, 1));
        let more = [("gid", "a"), ("mac", "b")];
        for (theirs, index, text) in [
            (
                words(&[("vm", &[&port, &more]), ("workers", &[&plain])]),
                1,
                "`mac` of `vm`",
            ),
            (
                words(&[("vm", &[&port]), ("workers", &[&plain])]),
                1,
                "`vm`",
            ),
            (
                words(&[("vm", &[&port, &port]), ("workers", &[&[("", "2")]])]),
                0,
                "`workers`",
            ),
            (words(&[("vm", &[&port, &port])]), 0, "`workers`"),
            (
                words(&[("a\u{1b}", &[&plain]), ("vm", &[&port, &port])]),
                0,
                "`workers`",
            ),
        ] {
            let Reply::Fixed(difference) = told(order(&theirs, version, "info")).unwrap() else {
                panic!("{text} may change");
            };
            assert_eq!((difference.index, &*difference.text()), (index, text));
            assert_eq!(count.get(), 0);
        }
        for (version, level) in [("0.0.0", "info"), (version, "loud")] {
            assert!(told(order(&ours, version, level)).is_err());
            assert_eq!(count.get(), 0);
        }
        let mut other = order(&ours, version, "info");
        other.changes = "x".into();
        assert!(told(other).is_err() && count.get() == 0);
    }

    #[test]
    fn a_daemon_says_why_it_does_not_follow() {
        let mut follow: Follow<u8> = Box::new(|_| Err("Not now".to_owned()));
        let fixed = Words::new();
        let options = order(&fixed, env!("CARGO_PKG_VERSION"), "off");
        let error = followed(options, &fixed, &mut follow).unwrap_err();
        assert_eq!(error.to_string(), "Not now");
    }
}
