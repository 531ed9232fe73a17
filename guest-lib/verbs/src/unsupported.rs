//! Functions that no Farlane backend offers yet: `EOPNOTSUPP`. The device's attributes say so
//! too (`max_mw`: zero).

use crate::errno::fail;
use crate::exports::pure_exports;
use crate::sys::*;
use std::ffi::{c_char, c_int, c_void};

/// "Operation not supported".
const UNSUPPORTED: c_int = crate::errno::EOPNOTSUPP;

// Ethernet addresses.
pure_exports! {
    /// Finds the Ethernet address of a GID.
    fn ibv_resolve_eth_l2_from_gid(_context: *mut ibv_context, _attr: *mut ibv_ah_attr,
        _mac: *mut u8, _vlan: *mut u16) -> c_int = fail(UNSUPPORTED);
}

// Queue pairs.
pure_exports! {
    /// Enhanced connection establishment.
    fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut c_void) -> c_int = fail(UNSUPPORTED);
    /// Enhanced connection establishment.
    fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut c_void) -> c_int = fail(UNSUPPORTED);
    /// Whether data arrives in order of address: no promise.
    fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _opcode: ibv_wr_opcode, _flags: u32) -> c_int
        = 0;
}

// Conversions from and to the kernel's structures: they serve librdmacm over its own kernel
// device, which nothing here can open.
pure_exports! {
    /// Address from the kernel's.
    fn ibv_copy_ah_attr_from_kern(_to: *mut ibv_ah_attr, _from: *mut c_void) -> () = ();
    /// Queue pair attributes from the kernel's.
    fn ibv_copy_qp_attr_from_kern(_to: *mut ibv_qp_attr, _from: *mut c_void) -> () = ();
    /// Path record from the kernel's.
    fn ibv_copy_path_rec_from_kern(_to: *mut c_void, _from: *mut c_void) -> () = ();
    /// Path record to the kernel's.
    fn ibv_copy_path_rec_to_kern(_to: *mut c_void, _from: *mut c_void) -> () = ();
    /// Registers a provider of the old kind: there are no providers.
    fn ibv_register_driver(_name: *const c_char, _init: *const c_void) -> () = ();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unsupported_function_says_so() {
        let (qp, ece) = (std::ptr::null_mut(), std::ptr::null_mut());
        assert_eq!(ibv_set_ece(qp, ece), UNSUPPORTED);
    }
}
