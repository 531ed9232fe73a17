//! Memory of CUDA devices: through `libcuda.so.1`, loaded when it is first asked for.
//!
//! A device pointer is no address of this process's own memory: file contents go through a buffer,
//! and the driver copies, from pinned memory at the same time as the file is read or written.
//! Copies are ordered as those of `cuMemcpy` are: after what is in the legacy default stream, and
//! in the streams that wait for it. Where an application has a mapping of the device's BAR
//! (gdrcopy), it registers that as [`soft`](super::Soft) instead.

use super::Provider;
use crate::lock::Lock;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// The driver's library.
const LIBRARY: &CStr = c"libcuda.so.1";
/// `CU_POINTER_ATTRIBUTE_CONTEXT`.
const POINTER_CONTEXT: c_int = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
const POINTER_MEMORY_TYPE: c_int = 2;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
const POINTER_DEVICE: c_int = 9;
/// `CU_POINTER_ATTRIBUTE_RANGE_START_ADDR` and `CU_POINTER_ATTRIBUTE_RANGE_SIZE`.
const POINTER_START: c_int = 11;
const POINTER_SIZE: c_int = 12;
/// `CU_POINTER_ATTRIBUTE_MAPPED`.
const POINTER_MAPPED: c_int = 13;
/// `CU_MEMORYTYPE_HOST` and `CU_MEMORYTYPE_DEVICE`.
const MEMORY_HOST: c_uint = 1;
const MEMORY_DEVICE: c_uint = 2;
/// `CU_MEMHOSTREGISTER_PORTABLE`: pinned for all contexts.
const REGISTER_PORTABLE: c_uint = 1;
/// `CU_STREAM_LEGACY`: the stream of `cuMemcpy`.
const STREAM_LEGACY: usize = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: what this thread does has nothing to do with graphs that
/// others capture.
const CAPTURE_RELAXED: c_int = 2;

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

/// Declares the functions of the driver that are used (cuda.h), and how they are found.
macro_rules! driver {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        /// The CUDA driver.
        #[derive(Debug)]
        pub struct Cuda {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// How often pinning has been refused in a row.
            refusals: AtomicU32,
            /// The primary contexts of devices that are retained, by ordinal: addresses, kept to
            /// the end.
            primary: Lock<BTreeMap<c_int, usize>>,
        }

        impl Cuda {
            fn of(
                find: impl Fn(&'static str) -> Result<*mut c_void, CudaError>,
            ) -> Result<Self, CudaError> {
                Ok(Self {
                    $($field: {
                        let found = find($name)?;
                        // SAFETY: the types are those of the driver's interface.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(found)
                        }
                    },)*
                    refusals: AtomicU32::new(0),
                    primary: Lock::new(BTreeMap::new()),
                })
            }
        }
    };
}

driver! {
    attribute = "cuPointerGetAttribute": fn(*mut c_void, c_int, u64);
    copy_in = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    copy_out = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    begin_copy_in = "cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, usize);
    begin_copy_out = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, usize);
    wait = "cuStreamSynchronize": fn(usize);
    register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    exchange_capture = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    push = "cuCtxPushCurrent_v2": fn(*mut c_void);
    pop = "cuCtxPopCurrent_v2": fn(*mut *mut c_void);
    current_device = "cuCtxGetDevice": fn(*mut c_int);
    find_device = "cuDeviceGet": fn(*mut c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
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
        Self::of(find)
    }

    /// An attribute of a pointer, which has the type that the driver writes.
    fn attribute<T: Copy>(&self, address: usize, attribute: c_int, mut value: T) -> Option<T> {
        let data: *mut T = &raw mut value;
        // SAFETY: the callers name the attribute's type.
        let status = unsafe { (self.attribute)(data.cast(), attribute, address as u64) };
        (status == 0).then_some(value)
    }

    /// Whether `address` is memory of a device, and not only reserved for some.
    #[must_use]
    pub fn is_device(&self, address: usize) -> bool {
        let kind: Option<c_uint> = self.attribute(address, POINTER_MEMORY_TYPE, 0);
        // A boolean, of a size that cuda.h does not tell; old drivers do not know it.
        let is_mapped: Option<u64> = self.attribute(address, POINTER_MAPPED, 0);
        kind == Some(MEMORY_DEVICE) && is_mapped != Some(0)
    }

    /// The allocation that `address` lies in, or the reservation of addresses
    /// (`cuMemAddressReserve`), of which not all need be mapped: first byte and length. Unlike
    /// `cuMemGetAddressRange`, pointer attributes are told in every thread, whatever context it
    /// has.
    #[must_use]
    pub fn allocation(&self, address: usize) -> Option<(usize, usize)> {
        let start: u64 = self.attribute(address, POINTER_START, 0)?;
        let length: usize = self.attribute(address, POINTER_SIZE, 0)?;
        let start = usize::try_from(start).ok()?;
        (length > 0).then_some((start, length))
    }

    /// As [`in_context`](Self::in_context), for calls that fail, and spoil the graph, where another
    /// thread captures one: not so these, as far as the driver lets it. `cuMemcpy` is none of them.
    fn apart_from_graphs(&self, address: usize, copy: impl FnOnce() -> c_int) -> Result<(), Errno> {
        let mut mode = CAPTURE_RELAXED;
        // SAFETY: the driver writes this thread's mode before.
        let is_relaxed = unsafe { (self.exchange_capture)(&raw mut mode) } == 0;
        let result = self.in_context(address, copy);
        if is_relaxed {
            // SAFETY: as above.
            unsafe { (self.exchange_capture)(&raw mut mode) };
        }
        result
    }

    /// Runs `copy` with a context current in this thread that reaches the allocation.
    fn in_context(&self, address: usize, copy: impl FnOnce() -> c_int) -> Result<(), Errno> {
        let null = std::ptr::null_mut::<c_void>();
        let found = self.attribute(address, POINTER_CONTEXT, null);
        let mut context = found.ok_or(Errno::FAULT)?;
        if context.is_null() {
            // Stream-ordered and mapped allocations are of no context: all of their device reach
            // them.
            let device: c_int = self
                .attribute(address, POINTER_DEVICE, -1)
                .ok_or(Errno::FAULT)?;
            if self.has_context_of(device) {
                return done(copy());
            }
            context = self.primary_of(device)?;
        }
        // SAFETY: a context of the driver's.
        if unsafe { (self.push)(context) } != 0 {
            return Err(Errno::FAULT);
        }
        let status = copy();
        // SAFETY: takes off what was pushed; the driver writes which one it was.
        unsafe { (self.pop)(&raw mut context) };
        done(status)
    }

    fn device_of(&self, ordinal: c_int) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: the driver writes the number of a device.
        let status = unsafe { (self.find_device)(&raw mut device, ordinal) };
        (status == 0).then_some(device)
    }

    /// Whether the context that is current in this thread is one of a device.
    fn has_context_of(&self, ordinal: c_int) -> bool {
        let mut current = 0;
        // SAFETY: as above; without a context it is an error.
        let status = unsafe { (self.current_device)(&raw mut current) };
        status == 0 && self.device_of(ordinal) == Some(current)
    }

    /// The primary context of a device, which is retained when it is asked for first.
    fn primary_of(&self, ordinal: c_int) -> Result<*mut c_void, Errno> {
        if let Some(known) = self.primary.lock().get(&ordinal) {
            return Ok(std::ptr::with_exposed_provenance_mut(*known));
        }
        let device = self.device_of(ordinal).ok_or(Errno::FAULT)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes the context.
        let status = unsafe { (self.retain)(&raw mut context, device) };
        if status != 0 || context.is_null() {
            return Err(Errno::FAULT);
        }
        // Where two threads are here at the same time it is retained twice, which does no harm.
        let address = context.expose_provenance();
        self.primary.lock().insert(ordinal, address);
        Ok(context)
    }
}

fn done(status: c_int) -> Result<(), Errno> {
    if status == 0 {
        Ok(())
    } else {
        Err(Errno::FAULT)
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
                .is_some_and(|(start, bytes)| last.checked_sub(start).is_some_and(|at| at < bytes))
            && self.is_device(last)
    }

    unsafe fn copy_in(&self, address: usize, from: &[u8]) -> Result<(), Errno> {
        self.in_context(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.copy_in)(address as u64, from.as_ptr().cast(), from.len()) }
        })
    }

    unsafe fn copy_out(&self, to: &mut [u8], address: usize) -> Result<(), Errno> {
        self.in_context(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.copy_out)(to.as_mut_ptr().cast(), address as u64, to.len()) }
        })
    }

    /// Whether the driver has pinned the buffer, or can. It has no more where the context is gone
    /// in which it did: then the driver copies it as other memory, and the calls that begin a copy
    /// return when the buffer is free again.
    fn pin(&self, address: usize, (buffer, length): (usize, usize)) -> bool {
        let kind: Option<c_uint> = self.attribute(buffer, POINTER_MEMORY_TYPE, 0);
        if kind == Some(MEMORY_HOST) {
            return true;
        }
        // Where it cannot, it is asked again less and less often.
        let refusals = self.refusals.load(Ordering::Relaxed);
        if refusals > 0 && !refusals.is_power_of_two() {
            self.refusals
                .store(refusals.saturating_add(1), Ordering::Relaxed);
            return false;
        }
        let memory = std::ptr::with_exposed_provenance_mut(buffer);
        let pinned = self.apart_from_graphs(address, || {
            // SAFETY: the buffer stays mapped for good, says the trait.
            unsafe { (self.register)(memory, length, REGISTER_PORTABLE) }
        });
        if pinned.is_ok() {
            // It would be copied for each child, which has no use for it.
            // SAFETY: the buffer's own pages; nothing changes in this process.
            let _ = unsafe { madvise(memory, length, Advice::LinuxDontFork) };
        }
        let refusals = if pinned.is_ok() {
            0
        } else {
            refusals.saturating_add(1)
        };
        self.refusals.store(refusals, Ordering::Relaxed);
        pinned.is_ok()
    }

    unsafe fn begin_copy_in(&self, address: usize, from: &[u8]) -> Result<(), Errno> {
        let (to, bytes) = (address as u64, from.len());
        self.apart_from_graphs(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.begin_copy_in)(to, from.as_ptr().cast(), bytes, STREAM_LEGACY) }
        })
    }

    unsafe fn begin_copy_out(&self, to: &mut [u8], address: usize) -> Result<(), Errno> {
        let (from, bytes) = (address as u64, to.len());
        self.apart_from_graphs(address, || {
            // SAFETY: registered, says the caller, and the driver checks.
            unsafe { (self.begin_copy_out)(to.as_mut_ptr().cast(), from, bytes, STREAM_LEGACY) }
        })
    }

    fn finish_copies(&self, address: usize) -> Result<(), Errno> {
        self.apart_from_graphs(address, || {
            // SAFETY: a stream that every context has.
            unsafe { (self.wait)(STREAM_LEGACY) }
        })
    }
}
