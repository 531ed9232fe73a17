//! `pod!`: a structure with a fixed layout. `wire!`: the same and, from the same text, in C.
//! `numbers!`: constants of one type.

use zerocopy::little_endian::{U16, U32, U64};

/// A type that can be a field of a structure shared with C.
pub trait CField {
    /// The C declaration of a field of this type.
    fn declare(name: &str) -> String;
}

macro_rules! c_scalar {
    ($($rust:ty => $c:literal),*) => {
        $(impl CField for $rust {
            fn declare(name: &str) -> String {
                format!("{} {name}", $c)
            }
        })*
    };
}
c_scalar!(u8 => "__u8", u16 => "__u16", u32 => "__u32", i32 => "__s32", u64 => "__u64",
          U16 => "__le16", U32 => "__le32", U64 => "__le64");

impl<T: CField, const N: usize> CField for [T; N] {
    fn declare(name: &str) -> String {
        format!("{}[{N}]", T::declare(name))
    }
}

/// A structure that knows its own C declaration.
pub trait CStruct {
    /// The declaration, with assertions of its size and of each offset.
    fn c_declaration() -> String;
}

macro_rules! pod {
    ($($(#[$doc:meta])* pub struct $name:ident {
        $($(#[$fdoc:meta])* pub $field:ident: $ty:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq,
                zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable,
                zerocopy::KnownLayout)]
            pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
        )*
    };
}
pub(crate) use pod;

macro_rules! numbers {
    ($ty:ty: $($(#[$doc:meta])* $name:ident = $value:expr,)*) => {
        $($(#[$doc])* pub const $name: $ty = $value;)*
    };
}
pub(crate) use numbers;

macro_rules! wire {
    ($($(#[$doc:meta])* pub struct $name:ident as $c:literal {
        $($(#[$fdoc:meta])* pub $field:ident: $ty:ty,)*
    })*) => {
        $(
            $crate::wire::pod! {
                $(#[$doc])*
                pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
            }

            impl $crate::CField for $name {
                fn declare(name: &str) -> String {
                    format!("struct {} {name}", $c)
                }
            }

            impl $crate::CStruct for $name {
                fn c_declaration() -> String {
                    use std::fmt::Write as _;
                    let mut out = format!("struct {} {{\n", $c);
                    $(let _ = writeln!(out, "\t{};",
                        <$ty as $crate::CField>::declare(stringify!($field)));)*
                    let _ = writeln!(out, "}};");
                    let _ = writeln!(out, "_Static_assert(sizeof(struct {}) == {}, \"size\");",
                        $c, size_of::<$name>());
                    $(let _ = writeln!(out,
                        "_Static_assert(offsetof(struct {}, {}) == {}, \"offset\");",
                        $c, stringify!($field), core::mem::offset_of!($name, $field));)*
                    out
                }
            }
        )*
    };
}
pub(crate) use wire;
