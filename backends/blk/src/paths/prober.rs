//! Looking at paths: whether one that is suspected can be read, and whether one that has failed is
//! back.

use super::health::Health;
use super::identity::{Identity, discover};
use super::open::differ;
use super::{DiskPath, PathId, Paths};
use farlane_block::bounce::Bounce;
use farlane_block::storage::{Place, Storage, size};
use farlane_daemon::log_limited;
use farlane_sys::chain;
use farlane_sys::sync::{held, lock};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Pause between two looks at a path that has failed.
const LOOK: Duration = Duration::from_secs(1);

/// Starts to look after the paths of a disk that can fail over, from a thread for each: a read of a
/// path that is broken can take long. They end when the paths are told to [end](Paths::end).
///
/// # Errors
/// There are no more threads.
pub fn start(paths: &Arc<Paths>) -> io::Result<()> {
    if !paths.fails_over() {
        return Ok(());
    }
    for (id, _) in paths.numbered() {
        let paths = Arc::clone(paths);
        std::thread::Builder::new()
            .name(format!("path {id}"))
            .spawn(move || look_after(&paths, id))?;
    }
    Ok(())
}

fn look_after(paths: &Paths, id: PathId) {
    let Some(path) = paths.get(id) else {
        return;
    };
    loop {
        let health = path.health();
        let pause = (health == Health::Failed).then_some(LOOK);
        if health != Health::Suspect {
            path.wait(pause);
        }
        if paths.ending.load(Ordering::Acquire) {
            return;
        }
        match path.health() {
            Health::Up => (),
            Health::Suspect => match paths.probe(&path.storage()) {
                // If it is not, it is looked at again, and has too few bytes.
                Ok(()) => {
                    paths.comes_up(path, Health::Suspect);
                }
                Err(e) => {
                    if path.health.change(Health::Suspect, Health::Failed) {
                        paths.has_failed(path, &e.to_string());
                    }
                }
            },
            Health::Failed => {
                if pause.is_some() && paths.returns(path) && paths.comes_up(path, Health::Failed) {
                    path.counters.returns.fetch_add(1, Ordering::Relaxed);
                    log_limited!(log::Level::Info, paths.limit, "Path {} is back", path.name);
                }
            }
        }
    }
}

impl DiskPath {
    /// Waits until somebody calls for attention, or for so long.
    fn wait(&self, pause: Option<Duration>) {
        let mut called = lock(&self.attention);
        while !*called {
            called = match pause {
                Some(pause) => {
                    let waited = self.wakes.wait_timeout(called, pause);
                    let (mut called, _) = held(waited);
                    *called = true;
                    called
                }
                None => {
                    let waited = self.wakes.wait(called);
                    held(waited)
                }
            };
        }
        *called = false;
    }
}

impl Paths {
    /// Reads a block of what is open, and looks whether the disk is all there.
    fn probe(&self, storage: &Storage) -> io::Result<()> {
        let bytes = size(&storage.file)?;
        if bytes < self.bytes.load(Ordering::Relaxed) {
            return Err(io::Error::other(format!("it has {bytes} bytes now")));
        }
        let length = usize::try_from(self.block).map_err(io::Error::other)?;
        let mut block = Bounce::new(length);
        // Block devices have whole blocks, and files of less are no disks.
        if rustix::io::pread(&storage.file, &mut *block, 0)? < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }

    /// Whether a path that has failed leads to the disk again: through what is open, or through
    /// what is found now.
    fn returns(&self, path: &DiskPath) -> bool {
        let storage = path.storage();
        if self.probe(&storage).is_ok() {
            let now = Identity::of(&self.sysfs, storage.place);
            return !storage.is_device || now.blocks == path.identity.blocks;
        }
        if !storage.is_device {
            return false;
        }
        for device in self.candidates(path) {
            match self.reopen(&device, path) {
                Ok(storage) => {
                    let user = lock(&self.user);
                    if let Some(user) = *user
                        && let Err(e) = storage.enter_now(user)
                    {
                        log::debug!("Path {} is in use: {e}", path.name);
                        return false;
                    }
                    path.replace(storage);
                    return true;
                }
                Err(e) => {
                    let (name, device) = (&path.name, device.display());
                    log::debug!("Path {name} is not back as {device}: {}", chain(&e));
                }
            }
        }
        false
    }

    /// Where a path that has gone may be found again: by its name, or under another one behind the
    /// same function.
    fn candidates(&self, path: &DiskPath) -> Vec<PathBuf> {
        let mut found = vec![path.device.clone()];
        if let (Some(blocks), Some(function)) = (&self.blocks, &path.identity.function) {
            for (device, identity) in discover(&self.sysfs, blocks) {
                if identity.function.as_ref() == Some(function) && !found.contains(&device) {
                    found.push(device);
                }
            }
        }
        found
    }

    fn reopen(&self, device: &std::path::Path, path: &DiskPath) -> io::Result<Storage> {
        let place = Place::of(device).map_err(io::Error::other)?;
        let mut others = self.all.iter().filter(|other| !std::ptr::eq(*other, path));
        if let Some(other) = others.find(|other| other.storage().place == place) {
            if other.place == path.place && other.health() == Health::Up {
                // Both were one device from the beginning.
                return other.storage().share();
            }
            // It may have got the name of a device that another path has.
            return Err(io::Error::other("that is another path"));
        }
        let storage = Storage::open_now(device, self.read_only).map_err(io::Error::other)?;
        let identity = Identity::of(&self.sysfs, storage.place);
        // Not their bytes: the disk may have grown meanwhile. That it is all there is seen below.
        if let Some(why) = differ(self.blocks.as_deref(), identity.blocks.as_deref()) {
            return Err(io::Error::other(why));
        }
        let fits = match (self.alignment, storage.go_direct(self.block.into())) {
            (Some(needed), Some(now)) => needed.memory >= now.memory && needed.offset >= now.offset,
            _ => false,
        };
        if !fits {
            return Err(io::Error::other(
                "it cannot be read and written directly as before",
            ));
        }
        self.probe(&storage)?;
        Ok(storage)
    }
}
