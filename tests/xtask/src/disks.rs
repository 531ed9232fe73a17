//! Disks as scenarios use them: `farlane-blk` over files, for whatever VMM connects.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use farlane_kit::backend::Backend;
use farlane_kit::guest::Guest;
use farlane_kit::progress;
use farlane_kit::scratch::Scratch;
use farlane_kit::workspace::Workspace;

use crate::conditions::wait_until;
use crate::metrics::Metrics;
use crate::run::Run;

/// The daemon, built from this checkout.
pub struct Disks {
    program: PathBuf,
}

/// A disk to serve. Its name is its serial number and that of its socket.
#[derive(Clone, Debug)]
pub struct Disk {
    name: String,
    paths: Paths,
    keys: String,
}

/// What holds a disk.
#[derive(Clone, Debug)]
enum Paths {
    One(PathBuf),
    /// One on each of these nodes, with its name.
    OnNodes(Vec<(u32, PathBuf, String)>),
}

/// A daemon that serves disks. It can be killed, and started again with the same words.
pub struct DiskBackend {
    program: PathBuf,
    words: Vec<OsString>,
    /// Those that it makes.
    sockets: Vec<PathBuf>,
    metrics: PathBuf,
    log: PathBuf,
    backend: Backend,
    starts: u32,
}

impl Disks {
    /// Builds the daemon.
    pub fn build(workspace: &Workspace) -> Result<Self> {
        progress::step("Building farlane-blk", || workspace.build(&["farlane-blk"]))?;
        Ok(Self {
            program: workspace.built("farlane-blk")?,
        })
    }

    /// Serves disks from one daemon, whose name is that of its files.
    pub fn serve(&self, run: &Run<'_>, name: &str, disks: &[Disk]) -> Result<DiskBackend> {
        self.serve_with(run, name, disks, &[], &[])
    }

    /// Serves disks from one daemon with further words on its command line, among them `sockets`
    /// that it makes.
    pub fn serve_with(
        &self,
        run: &Run<'_>,
        name: &str,
        disks: &[Disk],
        words: &[OsString],
        sockets: &[PathBuf],
    ) -> Result<DiskBackend> {
        let metrics = run.path(&format!("{name}-metrics"));
        let mut all = vec!["--metrics".into(), metrics.clone().into_os_string()];
        let mut made = vec![metrics.clone()];
        for disk in disks {
            let socket = socket(run, &disk.name);
            let (serial, keys) = (&disk.name, &disk.keys);
            let path = match &disk.paths {
                Paths::One(path) => format!(",path={}", path.display()),
                Paths::OnNodes(_) => String::new(),
            };
            let value = format!("socket={}{path},serial={serial}{keys}", socket.display());
            all.extend(["--disk".into(), value.into()]);
            made.push(socket);
            if let Paths::OnNodes(paths) = &disk.paths {
                for (node, path, name) in paths {
                    let path = path.display();
                    let value = format!("disk={serial},node={node},dev={path},name={name}");
                    all.extend(["--path".into(), value.into()]);
                }
            }
        }
        all.extend(words.iter().cloned());
        made.extend(sockets.iter().cloned());
        let log = run.logs().join(format!("{name}.log"));
        Ok(DiskBackend {
            backend: start(&self.program, &all, &made, &log)?,
            program: self.program.clone(),
            words: all,
            sockets: made,
            metrics,
            log,
            starts: 1,
        })
    }
}

fn start(program: &Path, words: &[OsString], sockets: &[PathBuf], log: &Path) -> Result<Backend> {
    let mut command = Command::new(program);
    command.args(words);
    let sockets: Vec<&Path> = sockets.iter().map(PathBuf::as_path).collect();
    Backend::start("farlane-blk", command, &sockets, log)
}

/// Where a disk of a run is served.
pub fn socket(run: &Run<'_>, disk: &str) -> PathBuf {
    run.path(&format!("disk-{disk}"))
}

/// Makes a file of so many bytes with two names, which are two paths to one disk.
pub fn two_paths(folder: &Scratch, name: &str, bytes: u64) -> Result<[PathBuf; 2]> {
    let first = folder.sparse(name, bytes)?;
    let second = folder.join(format!("{name}-again"));
    fs::hard_link(&first, &second).with_context(|| format!("Cannot make {}", second.display()))?;
    Ok([first, second])
}

/// What the path on a node is called.
pub fn path_name(node: u32) -> String {
    format!("path{node}")
}

impl Disk {
    /// A disk over a file.
    pub fn new(name: &str, path: &Path) -> Self {
        Self {
            name: name.to_owned(),
            paths: Paths::One(path.to_owned()),
            keys: String::new(),
        }
    }

    /// A disk with a path on each of nodes 0, 1 and so on, called `path0`, `path1` and so on.
    pub fn on_nodes(name: &str, paths: &[&Path]) -> Self {
        let paths = (0..).zip(paths);
        let paths = paths.map(|(node, path)| (node, path.to_path_buf(), path_name(node)));
        Self {
            name: name.to_owned(),
            paths: Paths::OnNodes(paths.collect()),
            keys: String::new(),
        }
    }

    /// With a further key of `--disk`.
    pub fn with(mut self, key: &str) -> Self {
        self.keys = format!("{},{key}", self.keys);
        self
    }
}

impl DiskBackend {
    /// Where it tells its counters.
    pub fn metrics_socket(&self) -> &Path {
        &self.metrics
    }

    /// Its counters.
    pub fn metrics(&self) -> Result<Metrics> {
        Metrics::read(&self.metrics, "farlane_blk_")
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.backend.pid()
    }

    /// Ends it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.backend.kill()
    }

    /// Starts it again after it has ended.
    pub fn start_again(&mut self) -> Result<()> {
        self.starts += 1;
        let log = self.log.with_extension(format!("{}.log", self.starts));
        self.backend = start(&self.program, &self.words, &self.sockets, &log)?;
        Ok(())
    }

    /// Ends it as its administrator does.
    pub fn stop(self) -> Result<()> {
        self.backend.stop()
    }
}

/// Waits until a guest has the virtio disk with this serial number; returns its device node.
pub fn node(guest: &Guest, serial: &str) -> Result<String> {
    let line = format!(
        "modprobe virtio_blk; for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = {serial} ] && \
         [ -b /dev/${{d##*/}} ] && echo /dev/${{d##*/}}; done 2>/dev/null; true"
    );
    let mut found = None;
    wait_until(&format!("the disk {serial} is there"), || {
        found = guest.run(&line)?.lines().next().map(str::to_owned);
        Ok(found.is_some())
    })
    .map_err(|error| error.context(format!("In guest {}", guest.name())))?;
    found.context("A disk was found and is not there")
}
