//! API remoting: one macro declares an API, and every part of its remoting follows from it.
//!
//! A *call table* is a list of calls, each with a number, an argument structure and a result
//! structure (paper section IV-B: "each identifier is an integer that corresponds to an entry in
//! the functions table used by the host backend"). [`call_table!`](crate::call_table) turns it into
//!
//! * a trait that the host implements,
//! * a dispatcher from (number, bytes) to that trait,
//! * a stub type for the guest, over any [`Caller`].
//!
//! A second API is a second table. [`crate::rdma`] is the first one.
//!
//! ```
//! use farlane_abi::{call_table, Errno};
//! call_table! {
//!     /// An API of one call.
//!     pub trait Counter / CounterStubs / COUNTER_CALLS {
//!         /// Adds to the counter and returns the new value.
//!         1 => fn add(farlane_abi::zerocopy::little_endian::U32)
//!             -> farlane_abi::zerocopy::little_endian::U32;
//!     }
//! }
//! struct Host(u32);
//! impl Counter for Host {
//!     fn add(&mut self, n: farlane_abi::zerocopy::little_endian::U32)
//!         -> Result<farlane_abi::zerocopy::little_endian::U32, Errno> {
//!         self.0 = self.0.checked_add(n.get()).ok_or(Errno::ERANGE)?;
//!         Ok(self.0.into())
//!     }
//! }
//! let mut result = [0; 4];
//! assert_eq!(Host(40).dispatch(1, &[2, 0, 0, 0], &mut result), Ok(4));
//! assert_eq!(result, [42, 0, 0, 0]);
//! assert_eq!(Host(0).dispatch(9, &[], &mut result), Err(Errno::ENOSYS));
//! ```

use crate::Errno;

/// Carries a call to the other side and its result back.
pub trait Caller {
    /// What can go wrong: an error number from the other side, or the way there.
    type Error: From<Errno>;

    /// Makes call `number` with `args`; writes the result's bytes to `result` and returns how
    /// many there are.
    ///
    /// # Errors
    /// The error number that the other side answered, or a failure of the transport.
    fn call(&self, number: u32, args: &[u8], result: &mut [u8]) -> Result<usize, Self::Error>;
}

/// Declares a remoted API; see the [module](self).
#[macro_export]
macro_rules! call_table {
    (
        $(#[$tdoc:meta])*
        pub trait $host:ident / $stubs:ident / $table:ident {
            $($(#[$doc:meta])* $number:literal => fn $name:ident($args:ty) -> $result:ty;)*
        }
    ) => {
        $(#[$tdoc])*
        ///
        /// The host's side.
        pub trait $host {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// The error number that the caller gets.
                fn $name(&mut self, args: $args) -> Result<$result, $crate::Errno>;
            )*

            /// Makes call `number`: takes the arguments from `args`, whose length must be exact,
            /// writes the result to `out` and returns its length in bytes.
            ///
            /// # Errors
            /// `ENOSYS` for an unknown number, `EPROTO` for arguments or room for the result of
            /// the wrong length, else what the call says.
            fn dispatch(
                &mut self,
                number: u32,
                args: &[u8],
                out: &mut [u8],
            ) -> Result<usize, $crate::Errno> {
                use $crate::zerocopy::{FromBytes as _, IntoBytes as _};
                match number {
                    $($number => {
                        let args = <$args>::read_from_bytes(args)
                            .map_err(|_| $crate::Errno::EPROTO)?;
                        let result = self.$name(args)?;
                        let bytes = result.as_bytes();
                        out.get_mut(..bytes.len())
                            .ok_or($crate::Errno::EPROTO)?
                            .copy_from_slice(bytes);
                        Ok(bytes.len())
                    })*
                    _ => Err($crate::Errno::ENOSYS),
                }
            }
        }

        $(#[$tdoc])*
        ///
        /// The guest's side.
        #[derive(Clone, Copy, Debug)]
        pub struct $stubs<T>(pub T);

        impl<T: $crate::calls::Caller> $stubs<T> {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// What the host answered, or a failure on the way.
                pub fn $name(&self, args: &$args) -> Result<$result, T::Error> {
                    use $crate::zerocopy::{FromZeros as _, IntoBytes as _};
                    let mut result = <$result>::new_zeroed();
                    let want = size_of::<$result>();
                    let got = $crate::calls::Caller::call(
                        &self.0, $number, args.as_bytes(), result.as_mut_bytes())?;
                    if got != want {
                        return Err($crate::Errno::EPROTO.into());
                    }
                    Ok(result)
                }
            )*
        }

        /// Number and name of every call.
        pub const $table: &[(u32, &str)] = &[$(($number, stringify!($name)),)*];

        const _: () = {
            $(assert!(size_of::<$args>() <= $crate::arena::CALL_PAYLOAD_BYTES
                && size_of::<$result>() <= $crate::arena::CALL_PAYLOAD_BYTES);)*
        };
    };
}
