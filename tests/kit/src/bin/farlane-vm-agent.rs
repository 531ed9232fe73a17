//! The agent in a test guest: runs shell commands side by side, passes their output on, sends them
//! signals, and reads and writes files, for the VM kit at the other end of a virtio-serial port.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use farlane_kit::protocol::{
    CHUNK_BYTES, Ending, PORT_NAME, Reply, Request, Stream, receive, send,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The end of the port that all threads write their replies to, a frame at a time.
type Replies = Arc<Mutex<File>>;

/// The process group of every job that is not reaped yet. Held while a job is reaped or signalled,
/// so that a signal never reaches a stranger that got the number of a dead job.
type Jobs = Arc<Mutex<HashMap<u32, Pid>>>;

fn main() -> Result<()> {
    let path = find_port()?;
    // The kernel lets a port be opened once; both directions share the one description.
    let port = OpenOptions::new().read(true).write(true).open(&path);
    let port = port.with_context(|| format!("Cannot open {}", path.display()))?;
    let mut requests = port.try_clone().context("Cannot share the agent port")?;
    let replies: Replies = Arc::new(Mutex::new(port));
    let jobs = Jobs::default();

    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")
        .context("Cannot read the kernel release")?;
    reply(
        &replies,
        &Reply::Hello {
            kernel: kernel.trim().to_owned(),
        },
    );
    while let Some(request) = receive(&mut requests)? {
        serve(request, &replies, &jobs);
    }
    Ok(())
}

/// The device node of the virtio-serial port with the agreed name.
fn find_port() -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").context("There is no virtio-serial")? {
        let entry = entry?;
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT_NAME {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    bail!("No virtio-serial port is named {PORT_NAME}")
}

fn serve(request: Request, replies: &Replies, jobs: &Jobs) {
    let (id, result) = match request {
        Request::Run { job, command } => {
            if let Err(error) = start(job, &command, replies, jobs) {
                reply(
                    replies,
                    &Reply::Failed {
                        id: job,
                        message: format!("{error:#}"),
                    },
                );
            }
            return;
        }
        Request::Signal { id, job, signal } => (id, signal_job(job, signal, jobs)),
        Request::Write {
            id,
            mode,
            append,
            path,
            data,
        } => (id, write_file(mode, append, Path::new(&path), &data)),
        Request::Read { id, path } => (id, read_file(id, Path::new(&path), replies)),
        Request::Ping { id } => (id, Ok(())),
    };
    let answer = match result {
        Ok(()) => Reply::Done { id },
        Err(error) => Reply::Failed {
            id,
            message: format!("{error:#}"),
        },
    };
    reply(replies, &answer);
}

fn start(job: u32, command: &str, replies: &Replies, jobs: &Jobs) -> Result<()> {
    let mut child = Command::new("/bin/sh")
        .arg("-c")
        .arg(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .context("Cannot start a shell")?;
    let stdout = child.stdout.take().context("The shell has no output")?;
    let stderr = child
        .stderr
        .take()
        .context("The shell has no error output")?;
    lock(jobs).insert(job, Pid::from_child(&child));
    let outputs = [
        pass_on(job, Stream::Stdout, stdout, Arc::clone(replies)),
        pass_on(job, Stream::Stderr, stderr, Arc::clone(replies)),
    ];
    let (replies, jobs) = (Arc::clone(replies), Arc::clone(jobs));
    thread::spawn(move || {
        let ended = reap(job, &mut child, &jobs);
        for output in outputs {
            if output.join().is_err() {
                eprintln!("The thread that passes on the output of job {job} panicked");
            }
        }
        reply(
            &replies,
            &match ended {
                Ok(status) => Reply::Ended {
                    job,
                    ending: ending(status),
                },
                Err(error) => Reply::Failed {
                    id: job,
                    message: format!("{error:#}"),
                },
            },
        );
    });
    Ok(())
}

/// Waits until a job's shell has ended, then forgets its process group and reaps it, in this order.
fn reap(job: u32, child: &mut Child, jobs: &Jobs) -> Result<ExitStatus> {
    waitid(
        WaitId::Pid(Pid::from_child(child)),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
    )
    .context("Cannot wait for a job")?;
    lock(jobs).remove(&job);
    child.wait().context("Cannot reap a job")
}

fn ending(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, signal) => Ending::Signalled(
            signal
                .and_then(|signal| u8::try_from(signal).ok())
                .unwrap_or(u8::MAX),
        ),
    }
}

fn pass_on(
    job: u32,
    stream: Stream,
    mut from: impl Read + Send + 'static,
    to: Replies,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match from.read(&mut buffer) {
                Ok(0) => return,
                Ok(length) => reply(
                    &to,
                    &Reply::Output {
                        job,
                        stream,
                        data: buffer[..length].to_vec(),
                    },
                ),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    eprintln!("Cannot read the output of job {job}: {error}");
                    return;
                }
            }
        }
    })
}

fn signal_job(job: u32, signal: u8, jobs: &Jobs) -> Result<()> {
    let signal = Signal::from_named_raw(i32::from(signal))
        .with_context(|| format!("There is no signal {signal}"))?;
    let jobs = lock(jobs);
    let group = jobs
        .get(&job)
        .with_context(|| format!("Job {job} has ended"))?;
    kill_process_group(*group, signal).with_context(|| format!("Cannot signal job {job}"))
}

fn write_file(mode: u32, append: bool, path: &Path, data: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("Cannot make {}", folder.display()))?;
    }
    let mut options = OpenOptions::new();
    if append {
        options.append(true);
    } else {
        options.write(true).create(true).truncate(true).mode(mode);
    }
    let mut file = options
        .open(path)
        .with_context(|| format!("Cannot open {}", path.display()))?;
    file.write_all(data)
        .with_context(|| format!("Cannot write {}", path.display()))
}

fn read_file(id: u32, path: &Path, replies: &Replies) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("Cannot open {}", path.display()))?;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let length = file
            .read(&mut buffer)
            .with_context(|| format!("Cannot read {}", path.display()))?;
        if length == 0 {
            return Ok(());
        }
        reply(
            replies,
            &Reply::Data {
                id,
                data: buffer[..length].to_vec(),
            },
        );
    }
}

/// Sends a reply. Without the port nobody is left to report to: the console gets a line.
fn reply(replies: &Replies, message: &Reply) {
    if let Err(error) = send(&mut *lock(replies), message) {
        eprintln!("Cannot reply to the VM kit: {error}");
    }
}

/// A panic while a lock is held leaves nothing half done here: both locks guard single operations.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
