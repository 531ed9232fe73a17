//! GPUDirect Storage's own interface (cufile.h), where its library is. Without its kernel module it
//! copies, too.

use crate::device::Memory;
use anyhow::{Result, anyhow, ensure};
use std::ffi::{CStr, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd as _;

const LIBRARY: &CStr = c"libcufile.so.0";
/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
const DESCRIPTOR: c_int = 1;

/// `CUfileError_t`.
#[repr(C)]
struct Status {
    file: c_int,
    cuda: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
struct Description {
    kind: c_int,
    fd: isize,
    operations: *const c_void,
}

type Open = unsafe extern "C" fn() -> Status;
type Register = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
type Transfer = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;

/// A file that it knows.
pub struct CuFile {
    read: Transfer,
    write: Transfer,
    handle: *mut c_void,
}

impl CuFile {
    /// # Errors
    /// When there is no such library, or it does not take the file.
    pub fn new(file: &File) -> Result<Self> {
        // SAFETY: loading it runs its constructors.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
        ensure!(!library.is_null(), "There is no {LIBRARY:?}");
        let find = |name: &CStr| {
            // SAFETY: the library stays loaded.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            let found = (!found.is_null()).then_some(found);
            found.ok_or_else(|| anyhow!("The library has no {name:?}"))
        };
        let mut handle = std::ptr::null_mut();
        let mut description = Description {
            kind: DESCRIPTOR,
            fd: file.as_raw_fd() as isize,
            operations: std::ptr::null(),
        };
        // SAFETY: the types are those of cufile.h; the library writes the handle.
        unsafe {
            let open: Open = std::mem::transmute(find(c"cuFileDriverOpen")?);
            let register: Register = std::mem::transmute(find(c"cuFileHandleRegister")?);
            let Status { file, cuda } = open();
            ensure!(file == 0, "cuFileDriverOpen: {file}, {cuda}");
            let Status { file, cuda } = register(&raw mut handle, &raw mut description);
            ensure!(file == 0, "cuFileHandleRegister: {file}, {cuda}");
            Ok(Self {
                read: std::mem::transmute::<*mut c_void, Transfer>(find(c"cuFileRead")?),
                write: std::mem::transmute::<*mut c_void, Transfer>(find(c"cuFileWrite")?),
                handle,
            })
        }
    }

    pub fn read(&self, memory: &Memory<'_>, size: usize, at: u64) -> Result<()> {
        let (to, at) = (memory.pointer(0), at.try_into()?);
        // SAFETY: a registered file, and memory of that size.
        let moved = unsafe { (self.read)(self.handle, to, size, at, 0) };
        ensure!(moved == size.cast_signed(), "cuFileRead: {moved}");
        Ok(())
    }

    pub fn write(&self, memory: &Memory<'_>, size: usize, at: u64) -> Result<()> {
        let (from, at) = (memory.pointer(0), at.try_into()?);
        // SAFETY: a registered file, and memory of that size.
        let moved = unsafe { (self.write)(self.handle, from, size, at, 0) };
        ensure!(moved == size.cast_signed(), "cuFileWrite: {moved}");
        Ok(())
    }
}
