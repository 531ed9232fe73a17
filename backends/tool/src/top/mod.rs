//! `farlane top`: what each device does, again and again.
//!
//! * [`rates`]: a row a device, from two looks; [`columns`]: what is shown of it, and in which
//!   order; [`view`]: the screen; [`keys`]: what is pressed;
//! * [`watch`]: looking, on a thread of its own; [`run`]: all of it.

pub mod columns;
pub mod keys;
pub mod rates;
mod screen;
pub mod view;
pub mod watch;

use crate::find::FindError;
use crate::options::TopOptions;
use anyhow::{Context as _, bail};
use columns::Column;
use farlane_daemon::terminal::{print, table};
use farlane_topology::interrupt::Interrupt;
use keys::Action;
use std::io::IsTerminal as _;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};
use view::View;
use watch::{Look, Watch};

/// Most time that a signal is not noticed, and a look not shown.
const LATE: Duration = Duration::from_millis(50);

/// Follows backends until a key or a signal ends it. To be called before there is a second thread.
///
/// # Errors
/// Backends cannot be looked for, or there is no terminal.
pub fn run(options: &TopOptions) -> anyhow::Result<()> {
    let interval = Duration::from_millis(options.interval_ms);
    let mut watch = Watch::new(options.backends.clone());
    if options.once {
        watch.look()?;
        std::thread::sleep(interval);
        return Ok(print(&text(&watch.look()?))?);
    }
    if !std::io::stdout().is_terminal() {
        bail!("Standard output is no terminal: --once prints one look");
    }
    let interrupt = Interrupt::begin().context("Cannot block signals")?;
    let looks = watch.again_and_again(interval)?;
    let Some(first) = first(&looks, &interrupt)? else {
        return Ok(());
    };
    let mut screen = screen::Screen::begin().context("Cannot use the terminal")?;
    let mut view = View::new(first);
    loop {
        screen.draw(|frame| view.draw(frame))?;
        match keys::next(LATE)? {
            Some(Action::End) => return Ok(()),
            Some(action) => view.act(action),
            None => {}
        }
        if interrupt.pause(Instant::now()) {
            return Ok(());
        }
        if let Some(look) = next(&looks)? {
            view.take(look);
        }
    }
}

type Looks = Receiver<Result<Look, FindError>>;

/// The first look; none where a signal came before: backends may let the time go by.
fn first(looks: &Looks, interrupt: &Interrupt) -> anyhow::Result<Option<Look>> {
    loop {
        if let Some(look) = next(looks)? {
            return Ok(Some(look));
        }
        if interrupt.pause(Instant::now() + LATE) {
            return Ok(None);
        }
    }
}

/// Another look, where there is one.
fn next(looks: &Looks) -> anyhow::Result<Option<Look>> {
    match looks.try_recv() {
        Ok(look) => Ok(Some(look?)),
        Err(TryRecvError::Empty) => Ok(None),
        Err(TryRecvError::Disconnected) => bail!("Nobody looks at backends any more"),
    }
}

/// A look as a table, and a line for each backend that does not answer.
fn text(look: &Look) -> String {
    let columns = Column::shown(&look.rows);
    let titles = columns.iter().map(|column| column.title().to_owned());
    let mut rows = vec![titles.collect::<Vec<_>>()];
    for row in Column::Backend.sorted(&look.rows, false) {
        rows.push(columns.iter().map(|column| column.cell(row)).collect());
    }
    let is_number = |at: &usize| columns.get(*at).is_some_and(|column| column.is_number());
    let to_the_right: Vec<_> = (0..columns.len()).filter(is_number).collect();
    let mut text = table(&rows, &to_the_right);
    for silent in &look.silent {
        text.push_str(silent);
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Backends;
    use crate::top::rates::tests::row;
    use farlane_daemon::metrics::MetricsAddress;
    use std::os::unix::net::UnixListener;

    /// Some are asked at once, others after those.
    const ASKED: usize = 256;

    #[test]
    fn a_signal_ends_the_first_look_at_backends_that_let_the_time_go_by() {
        // In a thread of its own: the mask is the thread's.
        let thread = std::thread::spawn(|| {
            let made = tempfile::tempdir().unwrap();
            let path = made.path().join("silent.metrics");
            let silent = UnixListener::bind(&path).unwrap();
            std::thread::spawn(move || silent.incoming().take(ASKED).collect::<Vec<_>>());
            let watch = Watch::new(Backends {
                sockets: vec![MetricsAddress::Path(path); ASKED],
                folder: made.path().to_owned(),
            });
            let interrupt = Interrupt::begin().unwrap();
            let looks = watch.again_and_again(Duration::ZERO).unwrap();
            // SAFETY: the signal is blocked in this thread, to which it goes.
            assert_eq!(unsafe { libc::raise(libc::SIGTERM) }, 0);
            let seen = first(&looks, &interrupt).unwrap();
            assert!(seen.is_none(), "the look has ended first");
        });
        thread.join().unwrap();
    }

    #[test]
    fn one_look_is_printed_as_a_table() {
        let look = Look {
            rows: vec![row("b", Some(2e6)), row("a", None)],
            silent: vec!["/x does not answer: why".to_owned()],
        };
        assert_eq!(
            text(&look),
            "BACKEND  NAME  DEVICE    BYTES/S  REQUESTS/S  LEASES  FAILOVERS  LOCAL\n\
             blk      vm0   disk a          -           -       -          -      -\n\
             blk      vm0   disk b  2.00 MB/s           -       -          -      -\n\
             /x does not answer: why\n"
        );
    }
}
