//! The `io_uring` of a worker, over all paths of a disk.

use super::{PathId, Paths};
use farlane_block::engine::memory::Access;
use farlane_block::ring::Ring;
use farlane_block::storage::Storage;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

/// A ring whose files are the paths.
#[derive(Debug)]
pub struct PathRing {
    ring: Ring,
    paths: Arc<Paths>,
    /// Which opening of each path the ring has, and what that is.
    generations: Vec<u32>,
    open: Vec<Arc<Storage>>,
}

impl PathRing {
    /// A ring for the calling thread, woken by `kicks`.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(paths: Arc<Paths>, kicks: &[BorrowedFd<'_>]) -> io::Result<Self> {
        // A path that is opened again meanwhile is replaced when it is used.
        let generations = paths.all().iter().map(|path| path.generation()).collect();
        let open: Vec<_> = paths.all().iter().map(|path| path.storage()).collect();
        let files: Vec<_> = open
            .iter()
            .map(|storage| storage.file.as_raw_fd())
            .collect();
        Ok(Self {
            ring: Ring::new(&files, kicks)?,
            paths,
            generations,
            open,
        })
    }

    /// What is open of a path, as far as the ring knows.
    #[must_use]
    pub fn storage(&self, path: PathId) -> Option<&Storage> {
        self.open.get(path.index()).map(AsRef::as_ref)
    }

    /// How the bytes of a path are moved.
    ///
    /// # Errors
    /// There is no such path.
    pub fn access(&mut self, path: PathId) -> io::Result<Access<'_>> {
        if self.paths.in_memory() {
            // What is in memory is never opened again.
            let storage = self.open.get(path.index()).ok_or(io::ErrorKind::NotFound)?;
            return Ok(Access::Memory(&storage.file));
        }
        let number = self.file(path)?;
        Ok(Access::Ring(&mut self.ring, number))
    }

    /// The number of a path's file, as it is open now.
    ///
    /// # Errors
    /// There is no such path.
    pub fn file(&mut self, path: PathId) -> io::Result<u32> {
        let number = path.file();
        let known = self.generations.get_mut(path.index());
        let open = self.open.get_mut(path.index());
        let (Some(known), Some(open), Some(path)) = (known, open, self.paths.get(path)) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let generation = path.generation();
        if *known != generation {
            let storage = path.storage();
            // Where it cannot be replaced, the old one fails, and another path is taken.
            if self
                .ring
                .replace_file(number, storage.file.as_raw_fd())
                .is_ok()
            {
                *known = generation;
                *open = storage;
            }
        }
        Ok(number)
    }
}

impl Deref for PathRing {
    type Target = Ring;

    fn deref(&self) -> &Ring {
        &self.ring
    }
}

impl DerefMut for PathRing {
    fn deref_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }
}
