//! `infiniband/verbs.h` of rdma-core 44: structures and numbers that cross the C interface.
//!
//! Made with bindgen and cut to what our libraries touch. Function pointers that it never fills
//! in are [`Unset`], structures that it never makes are opaque; offsets and sizes are asserted in
//! `layout.rs` of `libibverbs.so.1`. Names are those of the C header.
#![allow(
    non_camel_case_types,
    non_snake_case,
    missing_docs,
    reason = "the names are C's"
)]

pub use libc::{pthread_cond_t, pthread_mutex_t, timespec};

/// A function pointer that stays NULL: the caller's inline function then reports `EOPNOTSUPP`.
pub type Unset = Option<unsafe extern "C" fn()>;

/// Structures that our libraries never make: only pointers to them cross the interface.
macro_rules! opaque {
    ($($name:ident)*) => {
        $(
            #[repr(C)]
            #[derive(Debug)]
            pub struct $name {
                _private: [u8; 0],
            }
        )*
    };
}

/// Structures or unions as C lays them out, with every field public.
macro_rules! layouts {
    ($kind:tt: $($name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name {
                $(pub $field: $type,)*
            }
        )*
    };
}

/// C enumerations, and those of their constants that are used.
macro_rules! enumerations {
    ($($name:ident: $type:ty { $($constant:ident = $value:literal,)* })*) => {
        $(
            pub type $name = $type;
            $(pub const $constant: $name = $value;)*
        )*
    };
}

opaque! {
    _compat_ibv_port_attr ibv_rwq_ind_table ibv_wq
    verbs_ex_private
}

mod context;
mod device;
mod numbers;
mod objects;
pub mod qp_attr;
mod requests;

pub use context::*;
pub use device::*;
pub use numbers::*;
pub use objects::*;
pub use requests::*;
