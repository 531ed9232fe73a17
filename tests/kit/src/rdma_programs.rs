//! UCX, libfabric and Open MPI for guests: a file system of their root, made of a tree of its own
//! when a scenario wants it.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::contents::Contents;
use crate::debian;
use crate::guest_root::whole;
use crate::kit::Kit;
use crate::progress;
use crate::root_contents::{add_folder, add_programs};
use crate::tree::Tree;
use crate::workspace::Workspace;

/// Counts up when the way the file system is made changes.
const FORMAT: u32 = 1;

/// What its name begins with in the cache.
const PREFIX: &str = "rdma-programs-";

/// The programs, among them those that begin the processes of an MPI job on several machines, and
/// what UCX loads for RDMA.
const PROGRAMS: &[&str] = &[
    "usr/bin/NPopenmpi",
    "usr/bin/fi_info",
    "usr/bin/fi_pingpong",
    "usr/bin/io_demo",
    "usr/bin/mpirun.openmpi",
    "usr/bin/prted",
    "usr/bin/prterun",
    "usr/bin/ucx_info",
    "usr/bin/ucx_perftest",
    "usr/lib/x86_64-linux-gnu/ucx/libuct_ib.so.0",
    "usr/lib/x86_64-linux-gnu/ucx/libuct_rdmacm.so.0",
];

/// What MPI's programs load, and read.
const FOLDERS: &[&str] = &[
    "etc/openmpi",
    "usr/lib/x86_64-linux-gnu/openmpi/lib/openmpi40",
    "usr/lib/x86_64-linux-gnu/pmix2/lib/pmix",
    "usr/lib/x86_64-linux-gnu/pmix2/share",
    "usr/share/openmpi",
    "usr/share/prte",
];

/// Where MPI's headers are in the tree.
const MPI_HEADERS: &str = "usr/lib/x86_64-linux-gnu/openmpi/include";

/// The tree of these programs, and the file system of a guest's root.
#[derive(Debug)]
pub struct RdmaPrograms {
    /// For programs that run on this machine.
    pub tree: Tree,
    /// For [`crate::vm_config::VmConfig::image`].
    pub image: PathBuf,
}

impl RdmaPrograms {
    /// Finds them in the cache or makes them, for the guests of a kit.
    ///
    /// # Errors
    /// When they cannot be made.
    pub fn ensure(kit: &Kit) -> Result<Self> {
        let workspace = kit.workspace();
        let tree = Tree::ensure(workspace, &debian::RDMA_PROGRAMS)?;
        let mut hash = DefaultHasher::new();
        (FORMAT, PROGRAMS, FOLDERS, tree.made_at()?).hash(&mut hash);
        let name = format!("{PREFIX}{:016x}.erofs", hash.finish());
        let image = workspace.cache().join(&name);
        if !image.exists() {
            let _lock = tree.lock()?;
            if !image.exists() {
                progress::step("Making the file system of programs of RDMA", || {
                    remove_old(workspace)?;
                    whole(&image, |part| {
                        contents(&tree)?.write_image(kit.tree(), part)
                    })
                })?;
            }
        }
        Ok(Self { tree, image })
    }

    /// The folder of MPI's headers.
    #[must_use]
    pub fn mpi_headers(&self) -> PathBuf {
        self.tree.join(MPI_HEADERS)
    }

    /// MPI's library.
    #[must_use]
    pub fn mpi_library(&self) -> PathBuf {
        self.tree.libraries().join("libmpi.so.40")
    }
}

fn contents(tree: &Tree) -> Result<Contents> {
    let mut contents = Contents::default();
    let mut libraries = add_programs(tree, PROGRAMS, &mut contents)?;
    for folder in FOLDERS {
        libraries.extend(add_folder(tree, folder, &mut contents)?);
    }
    contents.copy_libraries(&libraries)?;
    Ok(contents)
}

fn remove_old(workspace: &Workspace) -> Result<()> {
    let cache = workspace.cache();
    for entry in fs::read_dir(&cache).with_context(|| format!("Cannot read {}", cache.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(PREFIX) {
            fs::remove_file(&path).with_context(|| format!("Cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}
