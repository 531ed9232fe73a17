//! Backends of a disk, one at a time.

use crate::{Options, scale};
use anyhow::{Context as _, Result};
use farlane_kit::backend;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// farlane-blk.
    Farlane,
    /// qemu-storage-daemon, with this way of asynchronous I/O.
    Qemu(&'static str),
}

/// A backend that runs, ended on drop.
pub struct Backend {
    _running: backend::Backend,
    socket: PathBuf,
}

impl Backend {
    /// Serves a file from a socket in `folder`.
    pub fn start(kind: Kind, options: &Options, folder: &Path, file: &Path) -> Result<Self> {
        let name = match kind {
            Kind::Farlane => "farlane",
            Kind::Qemu(aio) => aio,
        };
        let socket = folder.join(format!("{name}.socket"));
        if socket.exists() {
            std::fs::remove_file(&socket)?;
        }
        let (socket_text, file_text) = (socket.display(), file.display());
        let command = match kind {
            Kind::Farlane => {
                let mut command = Command::new(&options.backend);
                command.arg("--disk");
                command.arg(format!("socket={socket_text},path={file_text}"));
                command
            }
            Kind::Qemu(aio) => {
                let mut words = options.reference.iter();
                let mut command = Command::new(words.next().context("No qemu-storage-daemon")?);
                command.args(words);
                command.args(["--object", "iothread,id=thread", "--blockdev"]);
                // Others have the file, too.
                command.arg(format!(
                    "driver=file,node-name=disk,filename={file_text},cache.direct=on,\
                     aio={aio},locking=off"
                ));
                command.arg("--export").arg(format!(
                    "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,\
                     addr.path={socket_text},\
                     writable=on,iothread=thread"
                ));
                command
            }
        };
        let log = scale::log(options.output.folder(), name);
        Ok(Self {
            _running: backend::Backend::start(name, command, &[&socket], &log)?,
            socket,
        })
    }

    /// Where it serves.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
