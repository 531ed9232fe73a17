//! A C structure that a program sees, with Rust state behind it.

use crate::sys::*;
use std::cell::UnsafeCell;

/// A C structure for which all bytes zero are a valid value.
///
/// # Safety
/// Only for structures of integers, raw pointers and optional function pointers.
pub unsafe trait Plain: Sized {
    /// A value of which all bytes are zero.
    #[must_use]
    fn zeroed() -> Self {
        // SAFETY: valid by the contract of the trait.
        unsafe { std::mem::zeroed() }
    }
}

macro_rules! plain {
    ($($ty:ty)*) => {
        $(
            // SAFETY: integers, raw pointers and optional function pointers; the zero bytes of
            // pthread's types are their static initialisers.
            unsafe impl Plain for $ty {}
        )*
    };
}
plain!(ibv_device verbs_context ibv_device_attr ibv_device_attr_ex ibv_port_attr ibv_srq ibv_cq_ex
    ibv_qp
    ibv_qp_ex ibv_qp_init_attr);
#[cfg(test)]
plain!(ibv_send_wr);

/// A C structure `C` at the address that the program has, followed by Rust state `R`.
///
/// The program may read and write the structure; this library writes it before it hands it out
/// and, later, only fields that the interface reserves for it.
#[repr(C)]
pub struct Object<C, R> {
    shell: UnsafeCell<C>,
    inner: R,
}

impl<C, R> Object<C, R> {
    /// Makes an object and hands out its C structure. It lives until [`retire`](Self::retire).
    #[must_use]
    pub fn publish(shell: C, inner: R) -> *mut C {
        Box::into_raw(Box::new(Self {
            shell: UnsafeCell::new(shell),
            inner,
        }))
        .cast()
    }

    /// The Rust state behind a C structure.
    ///
    /// # Safety
    /// `shell` came from [`publish`](Self::publish) of this type and is not retired while the
    /// reference lives.
    #[inline]
    pub unsafe fn of<'a>(shell: *mut C) -> &'a R {
        // SAFETY: by the contract this is the object's address, and the program, which may write
        // the C structure, does not know of the state behind it.
        unsafe { &(*shell.cast::<Self>()).inner }
    }

    /// Frees an object and its state.
    ///
    /// # Safety
    /// `shell` came from [`publish`](Self::publish) of this type, and nobody uses it any more.
    pub unsafe fn retire(shell: *mut C) {
        // SAFETY: the address is that of the box that `publish` leaked.
        drop(unsafe { Box::from_raw(shell.cast::<Self>()) });
    }
}

/// The address of a C structure that lies in a table. It is only followed while the object that
/// it belongs to is in that table.
pub struct Address<C>(pub *mut C);

impl<C> std::fmt::Debug for Address<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<C> Clone for Address<C> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<C> Copy for Address<C> {}

// SAFETY: an address alone gives no access; every use of it is unsafe and guarded by the table's
// lock, and the objects themselves are usable from any thread.
unsafe impl<C> Send for Address<C> {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_state_lives_as_long_as_the_object() {
        let state = Arc::new(7);
        let shell = Object::<ibv_qp, _>::publish(ibv_qp::zeroed(), Arc::clone(&state));
        // SAFETY: published above.
        assert_eq!(**unsafe { Object::<ibv_qp, Arc<i32>>::of(shell) }, 7);
        assert_eq!(Arc::strong_count(&state), 2);
        // SAFETY: published above and not used any more.
        unsafe { Object::<ibv_qp, Arc<i32>>::retire(shell) };
        assert_eq!(Arc::strong_count(&state), 1);
    }
}
