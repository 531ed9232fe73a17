//! The first CUDA device, by the driver's own interface (cuda.h).

use anyhow::{Result, ensure};
use farlane_abi::width::to_usize;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

const LIBRARY: &CStr = c"libcuda.so.1";
/// `CU_MEMHOSTALLOC_PORTABLE`.
const PORTABLE: c_uint = 1;

macro_rules! driver {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Driver {
            fn load() -> Result<Self> {
                // SAFETY: loading the driver runs its constructors.
                let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
                ensure!(!library.is_null(), "There is no CUDA driver (libcuda.so.1)");
                Ok(Self {
                    $($field: {
                        let name = CString::new($name)?;
                        // SAFETY: the library stays loaded, and the types are those of cuda.h.
                        unsafe {
                            let found = libc::dlsym(library, name.as_ptr());
                            ensure!(!found.is_null(), "The driver has no {}", $name);
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

driver! {
    init = "cuInit": fn(c_uint);
    version = "cuDriverGetVersion": fn(*mut c_int);
    get = "cuDeviceGet": fn(*mut c_int, c_int);
    name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    retain = "cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
    set_current = "cuCtxSetCurrent": fn(*mut c_void);
    allocate = "cuMemAlloc_v2": fn(*mut u64, usize);
    allocate_async = "cuMemAllocAsync": fn(*mut u64, usize, usize);
    free = "cuMemFree_v2": fn(u64);
    allocate_host = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint);
    free_host = "cuMemFreeHost": fn(*mut c_void);
    copy_in = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    copy_out = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    synchronize = "cuCtxSynchronize": fn();
}

/// The device, its primary context being current in this thread.
pub struct Device {
    driver: Driver,
    context: *mut c_void,
    name: String,
    version: c_int,
}

// SAFETY: the driver's functions may be called in any thread, with any context.
unsafe impl Sync for Device {}

fn done(what: &str, status: c_int) -> Result<()> {
    ensure!(status == 0, "{what}: CUDA error {status}");
    Ok(())
}

impl Device {
    /// # Errors
    /// When there is no driver or no device.
    pub fn open() -> Result<Self> {
        let driver = Driver::load()?;
        let (mut version, mut device) = (0, 0);
        let mut context = std::ptr::null_mut();
        let mut name = [0; 128];
        // SAFETY: the driver writes what the pointers name.
        unsafe {
            done("cuInit", (driver.init)(0))?;
            done("The driver's version", (driver.version)(&raw mut version))?;
            done("The first device", (driver.get)(&raw mut device, 0))?;
            done("Its name", (driver.name)(name.as_mut_ptr(), 127, device))?;
            done("Its context", (driver.retain)(&raw mut context, device))?;
        }
        let name = name.iter().take_while(|byte| **byte != 0);
        let device = Self {
            driver,
            context,
            name: name
                .map(|byte| char::from(u8::from_ne_bytes(byte.to_ne_bytes())))
                .collect(),
            version,
        };
        device.make_current()?;
        Ok(device)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// As `cuDriverGetVersion` tells it: 13000 is CUDA 13.0.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Makes its context current in this thread.
    pub fn make_current(&self) -> Result<()> {
        // SAFETY: retained for good.
        done("Its context", unsafe {
            (self.driver.set_current)(self.context)
        })
    }

    /// Leaves this thread without a current context.
    pub fn leave(&self) -> Result<()> {
        let none = std::ptr::null_mut();
        // SAFETY: no context at all.
        done("No context", unsafe { (self.driver.set_current)(none) })
    }

    /// Memory of the device's primary context, or of none (stream-ordered).
    pub fn allocate(&self, bytes: usize, of_context: bool) -> Result<Memory<'_>> {
        let mut address = 0;
        let to = &raw mut address;
        // SAFETY: the driver writes the address.
        let status = unsafe {
            if of_context {
                (self.driver.allocate)(to, bytes)
            } else {
                (self.driver.allocate_async)(to, bytes, 0)
            }
        };
        done("Memory of the device", status)?;
        // SAFETY: waits for the allocation.
        done("Memory of the device", unsafe {
            (self.driver.synchronize)()
        })?;
        Ok(Memory {
            device: self,
            address,
            bytes,
        })
    }

    /// Pinned memory of the host.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned<'_>> {
        let mut base = std::ptr::null_mut();
        // SAFETY: the driver writes the address.
        let status = unsafe { (self.driver.allocate_host)(&raw mut base, bytes, PORTABLE) };
        done("Pinned memory", status)?;
        Ok(Pinned {
            device: self,
            base: base.cast(),
            bytes,
        })
    }
}

/// Memory of the device.
pub struct Memory<'device> {
    device: &'device Device,
    address: u64,
    bytes: usize,
}

impl Memory<'_> {
    /// For plain calls: no address of this process.
    pub fn pointer(&self, at: usize) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(to_usize(self.address + at as u64))
    }

    pub fn copy_in(&self, from: &[u8], at: usize) -> Result<()> {
        ensure!(at + from.len() <= self.bytes);
        let (to, bytes) = (self.address + at as u64, from.len());
        // SAFETY: both are so long.
        done("Copy", unsafe {
            (self.device.driver.copy_in)(to, from.as_ptr().cast(), bytes)
        })
    }

    pub fn copy_out(&self, to: &mut [u8], at: usize) -> Result<()> {
        ensure!(at + to.len() <= self.bytes);
        let (from, bytes) = (self.address + at as u64, to.len());
        // SAFETY: both are so long.
        done("Copy", unsafe {
            (self.device.driver.copy_out)(to.as_mut_ptr().cast(), from, bytes)
        })
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated there; nobody has the address any more.
        let _ = unsafe { (self.device.driver.free)(self.address) };
    }
}

/// Pinned memory of the host.
pub struct Pinned<'device> {
    device: &'device Device,
    base: *mut u8,
    bytes: usize,
}

impl Pinned<'_> {
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: so long, and lent out by `&mut self`.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.bytes) }
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated there.
        let _ = unsafe { (self.device.driver.free_host)(self.base.cast()) };
    }
}
