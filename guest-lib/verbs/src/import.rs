//! Several C structures of one context: `ibv_import_device` and what follows.
//!
//! A context's `cmd_fd` names it within its process: it is an empty file, of which a copy
//! (`dup(2)`) is the same file. A context has -1 instead where the kernel makes none, and
//! cannot be imported. Imported structures are of the same context at the backend, so
//! protection domains and registrations have the same handles in both.
//!
//! A file that came from another process stands for that one's context: the backend knows it, as
//! each process shows its own, and whoever shows it, too, has a right to what is there. The
//! importer has a context of its own, for queues and calls, and in it names for domains of the
//! other one.

use crate::context::{ContextState, Opened, shared};
use crate::device;
use crate::dm::{self, Dm, DmObject};
use crate::errno::{EINVAL, EOPNOTSUPP, fail_null};
use crate::memory::{Domain, Hold, MrObject, PdObject, Registration, domain};
use crate::open;
use crate::parent_domain::Uses;
use crate::sys::*;
use farlane_rdma_client::{Context, Mr, Pd, PerProcess, ShownFile};
use farlane_sys::memory_file;
use farlane_sys::sync::lock;
use rustix::fs::SealFlags;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, Weak};

/// `cmd_fd` of a context that has no file.
const NO_FILE: RawFd = -1;

/// The contexts of this process by their command files, while they are there.
static CONTEXTS: PerProcess<Mutex<BTreeMap<FileId, Weak<ContextState>>>> = PerProcess::new();

/// Which file a descriptor is of: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileId(u64, u64);

impl FileId {
    fn of(file: impl AsFd) -> rustix::io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self(stat.st_dev, stat.st_ino))
    }
}

/// Objects by handle, for as long as they are there.
type Handles<T> = Mutex<BTreeMap<u32, Weak<T>>>;

/// The file that names a context.
#[derive(Debug)]
struct CommandFile {
    file: OwnedFd,
    id: FileId,
}

impl CommandFile {
    fn new() -> rustix::io::Result<Self> {
        let file = memory_file("farlane-context")?;
        // It says which context, and holds nothing.
        rustix::fs::fcntl_add_seals(
            &file,
            SealFlags::GROW | SealFlags::SHRINK | SealFlags::WRITE | SealFlags::SEAL,
        )?;
        Ok(Self {
            id: FileId::of(&file)?,
            file,
        })
    }
}

/// How further C structures come to a context and its objects.
#[derive(Debug)]
pub(crate) struct Importable {
    /// None where the kernel would not make one.
    command_file: Option<CommandFile>,
    /// What leads to the context of another process that this one stands for.
    of_another: Option<ShownFile>,
    domains: Handles<Pd>,
    registrations: Handles<Mr>,
    memories: Handles<Dm>,
    /// Handles of registrations by key.
    keys: Mutex<BTreeMap<u32, u32>>,
}

impl Importable {
    pub(crate) fn new() -> Self {
        Self {
            // Few programs import contexts: all others do without.
            command_file: CommandFile::new().ok(),
            of_another: None,
            domains: Mutex::default(),
            registrations: Mutex::default(),
            memories: Mutex::default(),
            keys: Mutex::default(),
        }
    }

    /// Of a context that stands for another process's.
    fn of_another(file: ShownFile) -> Self {
        Self {
            command_file: None,
            of_another: Some(file),
            domains: Mutex::default(),
            registrations: Mutex::default(),
            memories: Mutex::default(),
            keys: Mutex::default(),
        }
    }

    /// Has other processes come to the context by its file. Where the backend cannot do that they
    /// do not.
    pub(crate) fn share(&self, context: &Context) {
        if let Some(command) = &self.command_file {
            let _ = context.share(command.file.as_fd());
        }
    }

    /// The context's `cmd_fd`.
    pub(crate) fn cmd_fd(&self) -> RawFd {
        let command_file = self.command_file.as_ref();
        command_file.map_or(NO_FILE, |command| command.file.as_raw_fd())
    }

    pub(crate) fn add_domain(&self, pd: &Arc<Pd>) {
        lock(&self.domains).insert(pd.handle(), Arc::downgrade(pd));
    }

    pub(crate) fn forget_domain(&self, pd: &Arc<Pd>) {
        forget(&self.domains, pd.handle(), pd);
    }

    pub(crate) fn add_registration(&self, mr: &Arc<Mr>) {
        lock(&self.keys).insert(mr.lkey(), mr.handle());
        lock(&self.registrations).insert(mr.handle(), Arc::downgrade(mr));
    }

    /// The registration that has a local key.
    pub(crate) fn registration_of_key(&self, key: u32) -> Option<Arc<Mr>> {
        let handle = *lock(&self.keys).get(&key)?;
        let found = find(&self.registrations, handle).ok()?;
        (found.lkey() == key).then_some(found)
    }

    pub(crate) fn add_memory(&self, dm: &Arc<Dm>) {
        lock(&self.memories).insert(dm.handle(), Arc::downgrade(dm));
    }

    pub(crate) fn forget_memory(&self, dm: &Arc<Dm>) {
        forget(&self.memories, dm.handle(), dm);
    }

    pub(crate) fn forget_registration(&self, mr: &Arc<Mr>) {
        forget(&self.registrations, mr.handle(), mr);
        let mut keys = lock(&self.keys);
        // A key may have a successor as a handle may.
        if find(&self.registrations, mr.handle()).is_err() {
            keys.remove(&mr.lkey());
        }
    }
}

impl Drop for Importable {
    fn drop(&mut self) {
        if let Some(command) = &self.command_file {
            lock(CONTEXTS.get()).remove(&command.id);
        }
    }
}

/// Takes an object out, unless the backend has given its handle to a successor already.
fn forget<T>(handles: &Handles<T>, handle: u32, of: &Arc<T>) {
    let mut handles = lock(handles);
    if handles
        .get(&handle)
        .is_some_and(|listed| listed.as_ptr() == Arc::as_ptr(of))
    {
        handles.remove(&handle);
    }
}

/// The object of a handle; `EINVAL` of none.
fn find<T>(handles: &Handles<T>, handle: u32) -> Result<Arc<T>, c_int> {
    let handles = lock(handles);
    let found = handles.get(&handle).and_then(Weak::upgrade);
    found.ok_or(EINVAL)
}

/// A context can be imported from now on.
pub(crate) fn announce(context: &Arc<ContextState>) {
    if let Some(command) = &context.importable.command_file {
        lock(CONTEXTS.get()).insert(command.id, Arc::downgrade(context));
    }
}

/// `ibv_import_device`: `cmd_fd` is the new structure's then, and closed with it.
pub unsafe fn device(cmd_fd: c_int) -> *mut ibv_context {
    if cmd_fd == NO_FILE {
        return fail_null(EOPNOTSUPP);
    }
    if cmd_fd < 0 {
        return fail_null(libc::EBADF);
    }
    // SAFETY: a number that is no descriptor is an error of the call that it is used in.
    let file = unsafe { BorrowedFd::borrow_raw(cmd_fd) };
    let id = match FileId::of(file) {
        Ok(id) => id,
        Err(error) => return fail_null(error.raw_os_error()),
    };
    let found = lock(CONTEXTS.get()).get(&id).and_then(Weak::upgrade);
    let Some(shared) = found.or_else(|| of_another(file)) else {
        return fail_null(EOPNOTSUPP);
    };
    let device = device::listed(shared.context.device().clone());
    let opened = Opened {
        shared,
        // SAFETY: the file is one of ours, and by the caller's contract the descriptor is given
        // away with this call.
        _imported_by: Some(unsafe { OwnedFd::from_raw_fd(cmd_fd) }),
    };
    open::publish(device, opened, cmd_fd)
}

/// A context for that of another process, where the file stands for one. Which device that is of
/// its backend alone knows.
fn of_another(file: BorrowedFd<'_>) -> Option<Arc<ContextState>> {
    farlane_rdma_client::devices().iter().find_map(|device| {
        let context = Context::open(device).ok()?;
        let shown = context.import(file).ok()?;
        Some(ContextState::new(context, Importable::of_another(shown)))
    })
}

/// The domain of a handle, which may be another process's.
fn find_domain(shared: &ContextState, handle: u32) -> Result<Arc<Pd>, c_int> {
    match &shared.importable.of_another {
        None => find(&shared.importable.domains, handle),
        Some(file) => {
            let imported = Pd::import(&shared.context, file, handle);
            imported.map_err(|error| error.errno().raw_os_error())
        }
    }
}

/// The registration of a handle in a domain.
fn find_registration(domain: &Domain, handle: u32) -> Result<Arc<Mr>, c_int> {
    let importable = &domain.shared.importable;
    if importable.of_another.is_some() {
        let imported = Mr::import(&domain.pd, handle).map(Arc::new);
        return imported.map_err(|error| error.errno().raw_os_error());
    }
    let found = find(&importable.registrations, handle)?;
    let is_there = Arc::ptr_eq(&found.pd(), &domain.pd);
    is_there.then_some(found).ok_or(EINVAL)
}

/// `ibv_import_pd`.
pub unsafe fn pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    match find_domain(shared, handle) {
        Ok(pd) => PdObject::publish(
            ibv_pd { context, handle },
            Domain {
                shared: Arc::clone(shared),
                pd,
                hold: Hold::Imported,
                uses: Uses::default(),
                parent: None,
            },
        ),
        Err(errno) => fail_null(errno),
    }
}

/// `ibv_unimport_pd`: the domain itself stays. One that was not imported stays as it is.
pub unsafe fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: by the caller's contract, and nobody uses it any more.
    unsafe {
        if domain(pd).hold == Hold::Imported {
            PdObject::retire(pd);
        }
    }
}

/// `ibv_import_mr`, into the same protection domain; the address of its memory is NULL, as the
/// manual page says.
pub unsafe fn mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: by the caller's contract.
    let (domain, context) = unsafe { (domain(pd), (*pd).context) };
    match find_registration(domain, handle) {
        Ok(mr) => MrObject::publish(
            ibv_mr {
                context,
                pd,
                addr: std::ptr::null_mut(),
                length: mr.length(),
                handle,
                lkey: mr.lkey(),
                rkey: mr.rkey(),
            },
            Registration {
                mr,
                shared: Arc::clone(&domain.shared),
                hold: Hold::Imported,
                parent: Mutex::new(domain.enter()),
                mapping: Mutex::new(None),
            },
        ),
        Err(errno) => fail_null(errno),
    }
}

/// `ibv_unimport_mr`: the registration itself stays. One that was not imported stays as it is.
pub unsafe fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: by the caller's contract, and nobody uses it any more.
    unsafe {
        if MrObject::of(mr).hold == Hold::Imported {
            MrObject::retire(mr);
        }
    }
}

/// `ibv_import_dm`, within one process.
pub unsafe fn dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: by the caller's contract.
    let shared = unsafe { shared(context) };
    if shared.importable.of_another.is_some() {
        return fail_null(EOPNOTSUPP);
    }
    match find(&shared.importable.memories, handle) {
        Ok(dm) => dm::publish(context, shared, dm, Hold::Imported),
        Err(errno) => fail_null(errno),
    }
}

/// `ibv_unimport_dm`: the memory itself stays. Of one that was not imported nothing changes.
pub unsafe fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: by the caller's contract, and nobody uses it any more.
    unsafe {
        if DmObject::of(dm).hold == Hold::Imported {
            DmObject::retire(dm);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, setrlimit};

    #[test]
    fn a_command_file_is_known_by_each_of_its_descriptors() {
        let [first, second] = [CommandFile::new().unwrap(), CommandFile::new().unwrap()];
        let copy = rustix::io::dup(&first.file).unwrap();
        assert_eq!(FileId::of(&copy).unwrap(), first.id);
        assert_ne!(first.id, second.id);
        // Nobody keeps data in it.
        assert!(rustix::io::write(&copy, b"x").is_err());
        assert!(rustix::fs::ftruncate(&copy, 4096).is_err());
    }

    #[test]
    fn a_context_needs_no_file() {
        // SAFETY: the child calls the kernel alone, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            let is_without =
                setrlimit(Resource::Nofile, none).is_ok() && Importable::new().cmd_fd() == NO_FILE;
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(i32::from(!is_without)) };
        }
        let mut status = -1;
        // SAFETY: the child is this test's.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        // SAFETY: no descriptor is given away.
        assert!(unsafe { device(NO_FILE) }.is_null());
        let errno = std::io::Error::last_os_error().raw_os_error();
        assert_eq!(errno, Some(EOPNOTSUPP));
    }

    #[test]
    fn a_file_that_is_no_context_is_not_taken() {
        let errno = || std::io::Error::last_os_error().raw_os_error();
        // SAFETY: none of these is a context's, so no descriptor is given away.
        unsafe {
            assert!(device(-2).is_null());
            assert_eq!(errno(), Some(libc::EBADF));
            let stranger = Importable::new();
            assert!(stranger.cmd_fd() >= 0);
            assert!(device(stranger.cmd_fd()).is_null());
            assert_eq!(errno(), Some(EOPNOTSUPP));
        }
    }

    #[test]
    fn a_successor_of_a_handle_is_not_forgotten() {
        let handles = Handles::default();
        let [first, second] = [Arc::new(1), Arc::new(2)];
        lock(&handles).insert(7, Arc::downgrade(&first));
        lock(&handles).insert(7, Arc::downgrade(&second));
        forget(&handles, 7, &first);
        assert_eq!(find(&handles, 7), Ok(Arc::clone(&second)));
        forget(&handles, 7, &second);
        assert_eq!(find(&handles, 7), Err(EINVAL));
    }
}
