//! Memory of CUDA devices: through `libcuda.so.1`, loaded when it is first asked for.
//!
//! A device pointer is no address of this process's own memory: file contents go through a bounce buffer, and the driver copies.
//! Where an application has a mapping of the device's BAR (gdrcopy), it registers that as [`soft`](super::Soft) instead.

use super::Provider;
use rustix::io::Errno;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::sync::{Arc, OnceLock};

/// The driver's library.
const LIBRARY: &CStr = c"libcuda.so.1";
/// `CU_POINTER_ATTRIBUTE_CONTEXT`.
const POINTER_CONTEXT: c_int = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_MEMORYTYPE_DEVICE`.
const MEMORY_DEVICE: c_uint = 2;

type GetAttribute = unsafe extern "C" fn(*mut c_void, c_int, u64) -> c_int;
type GetRange = unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int;
type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;

/// Why the driver cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The library cannot be loaded.
    #[error("Cannot load {0}")]
    Load(String),
    /// The library lacks a function.
    #[error("The driver has no {0}")]
    Symbol(&'static str),
}

/// The functions of the driver that are used.
#[derive(Debug)]
pub struct Cuda {
    attribute: GetAttribute,
    range: GetRange,
    copy_in: CopyIn,
    copy_out: CopyOut,
    push: Push,
    pop: Pop,
}

static SHARED: OnceLock<Arc<Cuda>> = OnceLock::new();

impl Cuda {
    /// The process's driver, loaded at the first call.
    ///
    /// # Errors
    /// When it cannot be loaded; the next call tries again.
    pub fn shared() -> Result<Arc<Self>, CudaError> {
        if let Some(cuda) = SHARED.get() {
            return Ok(Arc::clone(cuda));
        }
        let cuda = Arc::new(Self::load(LIBRARY, libc::RTLD_NOW)?);
        Ok(Arc::clone(SHARED.get_or_init(|| cuda)))
    }

    /// The driver, if the program has loaded it by itself.
    #[must_use]
    pub fn if_loaded() -> Option<Arc<Self>> {
        if let Some(cuda) = SHARED.get() {
            return Some(Arc::clone(cuda));
        }
        let cuda = Arc::new(Self::load(LIBRARY, libc::RTLD_NOW | libc::RTLD_NOLOAD).ok()?);
        Some(Arc::clone(SHARED.get_or_init(|| cuda)))
    }

    /// Loads the library at `path`. It stays loaded.
    ///
    /// # Errors
    /// When it cannot be loaded or lacks a function.
    pub fn load(path: &CStr, flags: c_int) -> Result<Self, CudaError> {
        // SAFETY: loading the driver runs its constructors, which is what the caller asks for.
        let library = unsafe { libc::dlopen(path.as_ptr(), flags) };
        if library.is_null() {
            return Err(CudaError::Load(path.to_string_lossy().into_owned()));
        }
        let find = |name: &'static str| {
            let text = CString::new(name).map_err(|_| CudaError::Symbol(name))?;
            // SAFETY: the library is loaded and stays so.
            let symbol = unsafe { libc::dlsym(library, text.as_ptr()) };
            if symbol.is_null() {
                Err(CudaError::Symbol(name))
            } else {
                Ok(symbol)
            }
        };
        // SAFETY: the types are those of the driver's interface (cuda.h).
        unsafe {
            Ok(Self {
                attribute: std::mem::transmute::<*mut c_void, GetAttribute>(find(
                    "cuPointerGetAttribute",
                )?),
                range: std::mem::transmute::<*mut c_void, GetRange>(find(
                    "cuMemGetAddressRange_v2",
                )?),
                copy_in: std::mem::transmute::<*mut c_void, CopyIn>(find("cuMemcpyHtoD_v2")?),
                copy_out: std::mem::transmute::<*mut c_void, CopyOut>(find("cuMemcpyDtoH_v2")?),
                push: std::mem::transmute::<*mut c_void, Push>(find("cuCtxPushCurrent_v2")?),
                pop: std::mem::transmute::<*mut c_void, Pop>(find("cuCtxPopCurrent_v2")?),
            })
        }
    }

    /// Whether `address` is memory of a device.
    #[must_use]
    pub fn is_device(&self, address: usize) -> bool {
        let mut kind: c_uint = 0;
        let data: *mut c_uint = &raw mut kind;
        // SAFETY: this attribute is an unsigned int.
        let status = unsafe { (self.attribute)(data.cast(), POINTER_MEMORY_TYPE, address as u64) };
        status == 0 && kind == MEMORY_DEVICE
    }

    /// The allocation that `address` lies in: first byte and length.
    #[must_use]
    pub fn allocation(&self, address: usize) -> Option<(usize, usize)> {
        let (mut start, mut length) = (0, 0);
        // SAFETY: both are written by the driver.
        let status = unsafe { (self.range)(&raw mut start, &raw mut length, address as u64) };
        (status == 0 && length > 0)
            .then(|| usize::try_from(start).ok())
            .flatten()
            .map(|start| (start, length))
    }

    /// Runs `copy` with the context of the allocation current in this thread.
    fn with_context(&self, address: usize, copy: impl FnOnce() -> c_int) -> Result<(), Errno> {
        let mut context = std::ptr::null_mut::<c_void>();
        let data: *mut *mut c_void = &raw mut context;
        // SAFETY: this attribute is a context, a pointer.
        let status = unsafe { (self.attribute)(data.cast(), POINTER_CONTEXT, address as u64) };
        // SAFETY: the driver's own context.
        if status != 0 || unsafe { (self.push)(context) } != 0 {
            return Err(Errno::FAULT);
        }
        let status = copy();
        // SAFETY: takes off what was pushed; the driver writes which one it was.
        unsafe { (self.pop)(&raw mut context) };
        if status == 0 {
            Ok(())
        } else {
            Err(Errno::FAULT)
        }
    }
}

impl Provider for Cuda {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn is_mapped(&self) -> bool {
        false
    }

    fn is_direct(&self) -> bool {
        false
    }

    fn holds(&self, address: usize, length: usize) -> bool {
        let last = address.saturating_add(length.max(1) - 1);
        self.is_device(address)
            && self
                .allocation(address)
                .is_some_and(|(start, bytes)| last - start < bytes)
    }

    unsafe fn copy_in(&self, address: usize, from: &[u8]) -> Result<(), Errno> {
        self.with_context(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.copy_in)(address as u64, from.as_ptr().cast(), from.len()) }
        })
    }

    unsafe fn copy_out(&self, to: &mut [u8], address: usize) -> Result<(), Errno> {
        self.with_context(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.copy_out)(to.as_mut_ptr().cast(), address as u64, to.len()) }
        })
    }
}
