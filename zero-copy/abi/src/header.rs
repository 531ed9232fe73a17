//! The C header of the guest driver, generated from this crate.
//!
//! `cargo run -p farlane-abi --example c_header > guest-driver/farlane_abi.h`

use crate::{CStruct as _, arena, config, control, ioctl};
use std::fmt::Write as _;

/// The text of `guest-driver/farlane_abi.h`.
#[must_use]
pub fn generate() -> String {
    let mut out = String::from(
        "/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */\n\
         /* Generated from zero-copy/abi; do not edit. See zero-copy/abi/src/header.rs. */\n\
         #ifndef FARLANE_ABI_H\n#define FARLANE_ABI_H\n\n\
         #include <linux/types.h>\n#include <linux/ioctl.h>\n#ifdef __KERNEL__\n\
         #include <linux/stddef.h>\n#include <linux/build_bug.h>\n#else\n\
         #include <stddef.h>\n#endif\n\n",
    );
    macro_rules! define {
        ($($prefix:literal: $($module:ident::$name:ident),*;)*) => {
            $($(let _ = writeln!(out, "#define {}{} {:#x}{}",
                $prefix, stringify!($name), $module::$name,
                if $module::$name as u128 > 0xffff_ffff { "ULL" } else { "" });)*)*
        };
    }
    define! {
        "FARLANE_": config::VIRTIO_ID, config::MAGIC, config::ABI_VERSION, config::QUEUE_CONTROL,
            config::QUEUE_EVENT, config::QUEUE_DOORBELL, config::QUEUES, config::QUEUE_SIZE,
            config::WINDOW_SHMEM_ID, config::FEATURE_WINDOW, config::FEATURE_TUNNEL;
        "FARLANE_": control::OP_OPEN, control::OP_CLOSE, control::OP_ATTACH,
            control::OP_ATTACH_MORE, control::OP_DETACH, control::OP_WINDOW_MAP,
            control::OP_WINDOW_UNMAP, control::OP_PING, control::KIND_SEGMENT, control::KIND_PIN,
            control::KIND_DEVICE, control::KIND_FILE, control::FLAG_WRITABLE, control::FLAG_PHONY,
            control::MAX_EXTENTS_PER_REQUEST, control::MAX_REGION_BYTES,
            control::MAX_SEGMENT_BYTES, control::EVENT_WAKE, control::MAX_CONTEXTS,
            control::MAX_REGIONS, control::MAX_FILES, control::MAX_EVENTS;
        "FARLANE_": arena::OFF_DEAD, arena::HEADER_SEGMENT_BYTES;
        "FARLANE_": ioctl::SEGMENT_SHIFT, ioctl::WINDOW_MMAP_BASE;
    }
    out.push('\n');
    for text in [
        config::Config::c_declaration(),
        control::Request::c_declaration(),
        control::Extent::c_declaration(),
        control::Reply::c_declaration(),
        control::Event::c_declaration(),
        ioctl::Info::c_declaration(),
        ioctl::Segment::c_declaration(),
        ioctl::Pin::c_declaration(),
        ioctl::Detach::c_declaration(),
        ioctl::File::c_declaration(),
        ioctl::BindEvent::c_declaration(),
    ] {
        out.push_str(&text);
        out.push('\n');
    }
    let t = ioctl::TYPE;
    for (name, how, nr, arg) in [
        ("INFO", "_IOR", 1, ", struct farlane_info"),
        ("SEGMENT", "_IOWR", 2, ", struct farlane_segment"),
        ("PIN", "_IOWR", 3, ", struct farlane_pin"),
        ("DETACH", "_IOW", 4, ", struct farlane_detach"),
        ("BIND_EVENT", "_IOW", 5, ", struct farlane_bind_event"),
        ("DOORBELL", "_IO", 6, ""),
        ("PIN_DEVICE", "_IOWR", 7, ", struct farlane_pin"),
        ("FILE", "_IOWR", 8, ", struct farlane_file"),
    ] {
        let _ = writeln!(out, "#define FARLANE_IOC_{name} {how}({t:#x}, {nr}{arg})");
    }
    for (name, value) in [
        ("INFO", ioctl::IOC_INFO),
        ("SEGMENT", ioctl::IOC_SEGMENT),
        ("PIN", ioctl::IOC_PIN),
        ("DETACH", ioctl::IOC_DETACH),
        ("BIND_EVENT", ioctl::IOC_BIND_EVENT),
        ("DOORBELL", ioctl::IOC_DOORBELL),
        ("PIN_DEVICE", ioctl::IOC_PIN_DEVICE),
        ("FILE", ioctl::IOC_FILE),
    ] {
        let _ = writeln!(
            out,
            "_Static_assert(FARLANE_IOC_{name} == {value:#x}, \"ioctl number\");"
        );
    }
    out.push_str("\n#endif\n");
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_checked_in_header_is_what_this_crate_generates() {
        let checked_in = include_str!("../../../guest-driver/farlane_abi.h");
        assert!(
            checked_in == super::generate(),
            "stale: cargo run -p farlane-abi --example c_header > guest-driver/farlane_abi.h"
        );
    }
}
