//! The C interface: `include/farlane.h` says what each function does.
//!
//! A `farlane *` is a boxed [`Library`]; a `farlane_buffer *` and a `farlane_endpoint *` are what
//! [`Arc::into_raw`] gives, so that an object found by its id has the pointer that the program
//! knows.

#![allow(
    missing_docs,
    reason = "the header documents them, for those who call them"
)]

use crate::{
    Buffer, Descriptor, Direction, Endpoint, Error, Id, Library, Outcome, Placement, RemoteBuffer,
    Status, Transfer,
};
use core::ffi::{CStr, c_char, c_int, c_void};
use farlane_abi::width::{at_most, to_u64};
use std::sync::Arc;
use std::time::Duration;

/// Answer of `farlane_query`: the transfer is on its way.
const PENDING: c_int = 1;

type CCallback = Option<unsafe extern "C" fn(transfer: u64, error: c_int, argument: *mut c_void)>;

/// A C callback's argument, on its way to the thread that calls it.
struct Argument(*mut c_void);

// SAFETY: the header says that callbacks run in other threads; what the argument points to is
// the program's business.
unsafe impl Send for Argument {}

impl Argument {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// Zero, or the negative error number.
fn status(result: Result<(), Error>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => -error.errno(),
    }
}

/// # Safety
/// `device` is NULL or a C string; `library` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_init(device: *const c_char, library: *mut *mut Library) -> c_int {
    let device = if device.is_null() {
        None
    } else {
        // SAFETY: a C string, says the caller.
        match unsafe { CStr::from_ptr(device) }.to_str() {
            Ok(name) => Some(name),
            Err(_) => return -libc::ENODEV,
        }
    };
    status(Library::open(device).map(|opened| {
        // SAFETY: can be written, says the caller.
        unsafe { library.write(Box::into_raw(Box::new(opened))) };
    }))
}

/// # Safety
/// `library` is NULL or from `farlane_init`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_cleanup(library: *mut Library) {
    if !library.is_null() {
        // SAFETY: a box made by farlane_init, given back once.
        drop(unsafe { Box::from_raw(library) });
    }
}

/// # Safety
/// `buffer` is NULL or from `farlane_buffer_allocate`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_buffer_free(buffer: *const Buffer) {
    if !buffer.is_null() {
        // SAFETY: the use that farlane_buffer_allocate gave out, given back once.
        drop(unsafe { Arc::from_raw(buffer) });
    }
}

/// # Safety
/// `endpoint` is NULL or from `farlane_endpoint_create`, and is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_endpoint_free(endpoint: *const Endpoint) {
    if !endpoint.is_null() {
        // SAFETY: the use that farlane_endpoint_create gave out, given back once.
        drop(unsafe { Arc::from_raw(endpoint) });
    }
}

/// Exports functions of an object, which C has as a pointer.
macro_rules! methods {
    ($(fn $name:ident($object:ident: &$type:ty $(, $arg:ident: $arg_type:ty)*) $(-> $ret:ty)?
        $body:block)*) => {
        $(
            /// # Safety
            /// The object is one that this library gave out and that is not freed yet; pointers to
            /// results can be written, descriptors can be read.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                $object: *const $type $(, $arg: $arg_type)*
            ) $(-> $ret)? {
                // SAFETY: an object that is not freed yet, says the caller.
                let $object = unsafe { &*$object };
                $body
            }
        )*
    };
}

methods! {
    fn farlane_buffer_allocate(library: &Library, length: usize, buffer: *mut *const Buffer)
        -> c_int {
        // SAFETY: can be written, says the caller.
        let give = |allocated| unsafe { buffer.write(Arc::into_raw(allocated)) };
        status(library.allocate(length).map(give))
    }

    fn farlane_buffer_address(buffer: &Buffer) -> *mut c_void {
        buffer.base().as_ptr().cast()
    }

    fn farlane_buffer_length(buffer: &Buffer) -> usize {
        buffer.length()
    }

    fn farlane_buffer_is_host(buffer: &Buffer) -> c_int {
        (buffer.placement() == Placement::Host).into()
    }

    fn farlane_buffer_id(buffer: &Buffer) -> u64 {
        buffer.id().get()
    }

    fn farlane_buffer_by_id(library: &Library, id: u64) -> *const Buffer {
        let found = library.buffer(Id::from_number(id));
        found.map_or(std::ptr::null(), |buffer| Arc::as_ptr(&buffer))
    }

    fn farlane_buffer_describe(buffer: &Buffer, descriptor: *mut Descriptor) {
        // SAFETY: can be written, says the caller.
        unsafe { descriptor.write(buffer.descriptor()) };
    }

    fn farlane_endpoint_create(library: &Library, endpoint: *mut *const Endpoint) -> c_int {
        // SAFETY: can be written, says the caller.
        let give = |created| unsafe { endpoint.write(Arc::into_raw(created)) };
        status(library.create_endpoint().map(give))
    }

    fn farlane_endpoint_id(endpoint: &Endpoint) -> u64 {
        endpoint.id().get()
    }

    fn farlane_endpoint_by_id(library: &Library, id: u64) -> *const Endpoint {
        let found = library.endpoint(Id::from_number(id));
        found.map_or(std::ptr::null(), |endpoint| Arc::as_ptr(&endpoint))
    }

    fn farlane_endpoint_describe(endpoint: &Endpoint, descriptor: *mut Descriptor) {
        // SAFETY: can be written, says the caller.
        unsafe { descriptor.write(endpoint.descriptor()) };
    }

    fn farlane_endpoint_connect(endpoint: &Endpoint, remote: *const Descriptor) -> c_int {
        // SAFETY: can be read, says the caller.
        status(endpoint.connect(unsafe { &*remote }))
    }

    fn farlane_query(library: &Library, transfer: u64) -> c_int {
        match library.query(Id::from_number(transfer)) {
            Ok(Status::Pending) => PENDING,
            Ok(Status::Finished(Ok(()))) => 0,
            Ok(Status::Finished(Err(error))) => -error.errno(),
            Err(error) => -error.errno(),
        }
    }

    fn farlane_dispatch(library: &Library, timeout_ms: c_int) -> c_int {
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        match library.dispatch(timeout) {
            // More than an `int` holds is as good as that many.
            Ok(ran) => at_most(to_u64(ran), c_int::MAX),
            Err(error) => -error.errno(),
        }
    }

    fn farlane_dispatcher_start(library: &Library) -> c_int {
        status(library.start_dispatcher())
    }

    fn farlane_dispatcher_stop(library: &Library) {
        library.stop_dispatcher();
    }
}

/// # Safety
/// `endpoint` and `local` are not freed yet; `remote` can be read; `callback` may be called once
/// with `argument` in any thread; `transfer` is NULL or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farlane_start(
    endpoint: *const Endpoint,
    direction: c_int,
    local: *const Buffer,
    local_offset: usize,
    remote: *const Descriptor,
    remote_offset: u64,
    length: usize,
    callback: CCallback,
    argument: *mut c_void,
    transfer: *mut u64,
) -> c_int {
    let direction = match direction {
        0 => Direction::Write,
        1 => Direction::Read,
        _ => return -libc::EINVAL,
    };
    // SAFETY: both were made by Arc::into_raw and are not freed yet, says the caller: the use
    // added here is the one that the new Arc gives back.
    let (endpoint, local) = unsafe {
        Arc::increment_strong_count(endpoint);
        Arc::increment_strong_count(local);
        (Arc::from_raw(endpoint), Arc::from_raw(local))
    };
    // SAFETY: can be read, says the caller.
    let remote = RemoteBuffer::try_from(unsafe { &*remote });
    let started = remote.and_then(|remote| {
        let wanted = Transfer {
            direction,
            local: &local,
            local_offset,
            remote: &remote,
            remote_offset,
            length,
        };
        match callback {
            None => endpoint.start(&wanted),
            Some(callback) => {
                let argument = Argument(argument);
                endpoint.start_with(&wanted, move |id, outcome: Outcome| {
                    let error = outcome.err().map_or(0, crate::TransferError::errno);
                    // SAFETY: may be called once in any thread, says the caller.
                    unsafe { callback(id.get(), error, argument.get()) };
                })
            }
        }
    });
    status(started.map(|id| {
        if !transfer.is_null() {
            // SAFETY: can be written, says the caller.
            unsafe { transfer.write(id.get()) };
        }
    }))
}
