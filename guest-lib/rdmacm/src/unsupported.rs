//! What there is not yet: `EOPNOTSUPP`. Sockets over RDMA (`rsocket`), and enhanced connection
//! establishment.

use crate::errno::fail;
use crate::sys::rdma_cm_id;
use farlane_abi::Errno;
use std::ffi::{c_int, c_void};

/// Functions that fail, whatever they are given: arguments are not declared, as in the C calling
/// conventions of Linux a callee may ignore them.
macro_rules! stubs {
    ($($name:ident: $type:ty;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> $type {
                fail(Errno::EOPNOTSUPP);
                -1
            }
        )*
    };
}

stubs! {
    raccept: c_int;
    rbind: c_int;
    rclose: c_int;
    rconnect: c_int;
    rfcntl: c_int;
    rgetpeername: c_int;
    rgetsockname: c_int;
    rgetsockopt: c_int;
    riomap: i64;
    riounmap: c_int;
    riowrite: isize;
    rlisten: c_int;
    rpoll: c_int;
    rread: isize;
    rreadv: isize;
    rrecv: isize;
    rrecvfrom: isize;
    rrecvmsg: isize;
    rselect: c_int;
    rsend: isize;
    rsendmsg: isize;
    rsendto: isize;
    rsetsockopt: c_int;
    rshutdown: c_int;
    rsocket: c_int;
    rwrite: isize;
    rwritev: isize;
}

/// `rdma_set_local_ece`.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_set_local_ece(_id: *mut rdma_cm_id, _ece: *mut c_void) -> c_int {
    fail(Errno::EOPNOTSUPP)
}

/// `rdma_get_remote_ece`.
#[unsafe(no_mangle)]
pub extern "C" fn rdma_get_remote_ece(_id: *mut rdma_cm_id, _ece: *mut c_void) -> c_int {
    fail(Errno::EOPNOTSUPP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_function_says_so() {
        assert_eq!((rsocket(), rread()), (-1, -1));
        assert_eq!(crate::errno::last(), Errno::EOPNOTSUPP);
        assert_eq!(
            rdma_set_local_ece(std::ptr::null_mut(), std::ptr::null_mut()),
            -1
        );
    }
}
