//! Opening paths, and making sure that they lead to the same disk.

use super::health::Changing;
use super::identity::{Identity, discover};
use super::{DiskPath, FIRST_MARK, MAX_PATHS, PathConfig, PathCounters, PathId, Paths};
use crate::disk::Cache;
use crate::surroundings::Surroundings;
use farlane_block::storage::{Alignment, Place, Storage, StorageError};
use farlane_block::syncs::Syncs;
use farlane_daemon::log_limit::LogLimit;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use thiserror::Error;

/// Why there are no paths.
#[derive(Debug, Error)]
pub enum PathError {
    /// One cannot be opened.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// No descriptors.
    #[error("Cannot open a file a second time")]
    Io(#[from] std::io::Error),
    /// None, or too many.
    #[error("A disk has 1 to {MAX_PATHS} paths, not {0}")]
    Number(usize),
    /// They are not the same.
    #[error("{} and {} are not the same disk: {why}", one.display(), other.display())]
    Different {
        /// One path.
        one: PathBuf,
        /// Another.
        other: PathBuf,
        /// What tells them apart.
        why: String,
    },
    /// What was written over one path would be in a cache that another one does not look into.
    #[error("{} cannot be read and written directly, which several paths need", .0.display())]
    NotDirect(PathBuf),
    /// There is nothing to discover by.
    #[error("The kernel does not tell which other devices have the blocks of {}", .0.display())]
    Unknown(PathBuf),
    /// A name that does not fit.
    #[error("{0:?} is no name for a path, or that of two")]
    Name(String),
}

/// How paths are opened.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Whether they are only read.
    pub read_only: bool,
    /// Whether the page cache takes part.
    pub cache: Cache,
    /// Bytes of a block.
    pub block: u32,
    /// Whether further paths to the first one's blocks are looked for.
    pub discovers: bool,
}

/// One that is open.
pub(super) struct Open {
    config: PathConfig,
    identity: Identity,
    storage: Storage,
    alignment: Option<Alignment>,
}

impl Open {
    pub(super) fn new(
        config: PathConfig,
        others: &[Self],
        manner: Manner,
        sysfs: &Path,
    ) -> Result<Self, PathError> {
        let place = Place::of(&config.device)?;
        let same = others.iter().find(|other| other.storage.place == place);
        let storage = match same {
            // It is locked already, by this process.
            Some(other) => other.storage.share()?,
            None => Storage::open(&config.device, manner.read_only)?,
        };
        let identity = Identity::of(sysfs, storage.place);
        let alignment = match manner.cache {
            Cache::Direct if !storage.in_memory => storage.go_direct(manner.block.into()),
            Cache::Direct | Cache::Buffered => None,
        };
        Ok(Self {
            config,
            identity,
            storage,
            alignment,
        })
    }
}

/// What tells two block devices apart, by what the kernel calls their blocks.
pub(super) fn differ(one: Option<&str>, other: Option<&str>) -> Option<String> {
    match (one, other) {
        (Some(a), Some(b)) if a == b => None,
        (Some(a), Some(b)) => Some(format!("the kernel calls them {a} and {b}")),
        _ => Some("the kernel does not tell that they are".to_owned()),
    }
}

/// The difference between two paths.
fn tells_apart(one: &Open, other: &Open) -> Option<String> {
    if one.storage.place == other.storage.place {
        return None;
    }
    if !one.storage.is_device || !other.storage.is_device {
        return Some("they are not the same file".to_owned());
    }
    let blocks = |open: &'_ Open| open.identity.blocks.clone();
    let (one_bytes, other_bytes) = (one.storage.bytes, other.storage.bytes);
    differ(blocks(one).as_deref(), blocks(other).as_deref()).or_else(|| {
        let why = || format!("they have {one_bytes} and {other_bytes} bytes");
        (one_bytes != other_bytes).then(why)
    })
}

impl Paths {
    /// Opens the paths to a disk.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn open(
        configs: &[PathConfig],
        manner: Manner,
        around: &Surroundings,
    ) -> Result<Self, PathError> {
        let sysfs = &around.sysfs;
        let mut opened: Vec<Open> = Vec::new();
        for config in configs.iter().take(MAX_PATHS + 1) {
            opened.push(Open::new(config.clone(), &opened, manner, sysfs)?);
        }
        let Some(first) = opened.first() else {
            return Err(PathError::Number(0));
        };
        let blocks = first.identity.blocks.clone();
        if manner.discovers {
            let device = first.config.device.clone();
            let blocks = blocks.as_ref().ok_or(PathError::Unknown(device))?;
            for (device, _) in discover(sysfs, blocks) {
                let place = Place::of(&device)?;
                if opened.iter().all(|open| open.storage.place != place) {
                    let config = PathConfig::new(device);
                    opened.push(Open::new(config, &opened, manner, sysfs)?);
                }
            }
            log::info!("{} paths to {blocks}", opened.len());
        }
        if opened.len() > MAX_PATHS {
            return Err(PathError::Number(opened.len()));
        }
        Self::check(&opened)?;
        Self::build(opened, manner, around, blocks)
    }

    fn check(opened: &[Open]) -> Result<(), PathError> {
        let Some((first, others)) = opened.split_first() else {
            return Err(PathError::Number(0));
        };
        for other in others {
            if let Some(why) = tells_apart(first, other) {
                return Err(PathError::Different {
                    one: first.config.device.clone(),
                    other: other.config.device.clone(),
                    why,
                });
            }
        }
        let one_place = others
            .iter()
            .all(|o| o.storage.place == first.storage.place);
        let cached = opened.iter().find(|open| open.alignment.is_none());
        match cached.filter(|_| !one_place) {
            Some(open) => Err(PathError::NotDirect(open.config.device.clone())),
            None => Ok(()),
        }
    }

    pub(super) fn build(
        opened: Vec<Open>,
        manner: Manner,
        around: &Surroundings,
        blocks: Option<String>,
    ) -> Result<Self, PathError> {
        let topology = around.nodes.topology();
        let fallback = topology.nodes().first().copied().unwrap_or_default();
        let alignment = opened
            .iter()
            .try_fold(None, |most: Option<Alignment>, open| {
                let alignment = open.alignment?;
                let most = most.unwrap_or(alignment);
                Some(Some(Alignment {
                    memory: most.memory.max(alignment.memory),
                    offset: most.offset.max(alignment.offset),
                }))
            });
        let in_memory = opened.iter().all(|open| open.storage.in_memory);
        let first = opened.first().ok_or(PathError::Number(0))?;
        let bytes = first.storage.bytes;
        let mut all: Vec<DiskPath> = Vec::new();
        for open in opened {
            let name = name(&open.config, &all)?;
            let told = open.config.node.or(open.identity.node);
            let place = open.storage.place;
            let same = all.iter().find(|other| other.place == place);
            let syncs = same.map_or_else(Syncs::default, |same| same.syncs.clone());
            all.push(DiskPath {
                name,
                node: told.unwrap_or(fallback),
                device: open.config.device,
                identity: open.identity,
                place,
                storage: RwLock::new(Arc::new(open.storage)),
                generation: AtomicU32::new(0),
                health: Changing::new(),
                written: AtomicU64::new(FIRST_MARK),
                synced: AtomicU64::new(0),
                syncs,
                counters: PathCounters::default(),
                attention: Mutex::new(false),
                wakes: Condvar::new(),
            });
        }
        let nearest = around.nodes.all().iter().map(|worker_node| {
            let node = worker_node.node();
            let mut order: Vec<_> = PathId::all().zip(&all).collect();
            order.sort_by_key(|(_, path)| topology.proximity(node, path.node));
            order.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
        });
        Ok(Self {
            nearest: nearest.collect(),
            fails_over: all
                .iter()
                .any(|p| Some(p.place) != all.first().map(|f| f.place)),
            all,
            alignment: alignment.flatten(),
            in_memory,
            read_only: manner.read_only,
            block: manner.block,
            sysfs: around.sysfs.clone(),
            blocks,
            bytes: AtomicU64::new(bytes),
            shrinking: Mutex::default(),
            changing: Mutex::default(),
            ending: AtomicBool::new(false),
            user: Mutex::default(),
            limit: LogLimit::new(),
        })
    }
}

/// What a path is called: a word of its own.
fn name(config: &PathConfig, others: &[DiskPath]) -> Result<String, PathError> {
    let taken = |name: &str| others.iter().any(|other| other.name == name);
    if let Some(name) = &config.name {
        let fits = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\' | ',');
        if name.is_empty() || !name.chars().all(fits) || taken(name) {
            return Err(PathError::Name(name.clone()));
        }
        return Ok(name.clone());
    }
    let file = config
        .device
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    let plain: String = file
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "._-+@".contains(c) {
                c
            } else {
                '_'
            }
        })
        .collect();
    let mut name = plain.clone();
    let mut number = 1;
    while taken(&name) {
        number += 1;
        name = format!("{plain}:{number}");
    }
    Ok(name)
}
