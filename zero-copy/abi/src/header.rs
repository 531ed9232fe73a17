//! The C headers of the guest driver, generated from this crate.
//!
//! `cargo run -p farlane-abi --example c_header > guest-driver/farlane_abi.h`, and
//! `... --example c_header verbs > guest-driver/farlane_verbs_abi.h`.

use crate::{CStruct as _, arena, config, control, ioctl, queue, rdma, rxe};
use std::fmt::Write as _;

/// How a header begins.
fn preamble(guard: &str) -> String {
    format!(
        "/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause */\n\
         /* Generated from zero-copy/abi; do not edit. See zero-copy/abi/src/header.rs. */\n\
         #ifndef {guard}\n#define {guard}\n\n\
         #include <linux/types.h>\n#include <linux/ioctl.h>\n#ifdef __KERNEL__\n\
         #include <linux/stddef.h>\n#include <linux/build_bug.h>\n#else\n\
         #include <stddef.h>\n#endif\n\n"
    )
}

macro_rules! define {
    ($out:ident, $($prefix:literal: $($module:ident::$name:ident),*;)*) => {
        $($(let _ = writeln!($out, "#define {}{} {:#x}{}",
            $prefix, stringify!($name), $module::$name,
            if $module::$name as u128 > 0xffff_ffff { "ULL" } else { "" });)*)*
    };
}

/// The text of `guest-driver/farlane_verbs_abi.h`: the verbs, for a driver of the kernel.
#[must_use]
pub fn generate_verbs() -> String {
    let mut out = preamble("FARLANE_VERBS_ABI_H");
    define! { out,
        "FARLANE_": arena::OFF_BACKEND_STATE, arena::OFF_CALLER_WAITING, arena::OFF_CALL_SUBMITTED,
            arena::OFF_CALL_COMPLETED, arena::OFF_ASYNC_PRODUCED, arena::OFF_ASYNC_CONSUMED,
            arena::OFF_ASYNC_RING, arena::OFF_CALL_RING, arena::OFF_RUNG_SUMMARY, arena::OFF_RUNG,
            arena::RUNG_WORDS, arena::BACKEND_AWAKE, arena::BACKEND_SLEEPING, arena::ASYNC_ENTRIES,
            arena::CALL_SLOTS, arena::CALL_SLOT_BYTES, arena::CALL_PAYLOAD_BYTES;
        "FARLANE_": control::OP_ADD_GID, control::OP_DEL_GID, control::KIND_ALL_MEMORY,
            control::FLAG_KERNEL, control::EVENT_ASYNC, control::EVENT_FIRST_CHANNEL;
        "FARLANE_": rdma::HANDLE_SLOT_BITS, rdma::MAX_QPS, rdma::MAX_SRQS, rdma::MR_SOURCE_PIN,
            rdma::MULTICAST_QPN, rdma::MAX_FAST_PAGES, rdma::QPT_GSI;
        "FARLANE_": rxe::CONTROL_OFF_BACKEND_STATE, rxe::CONTROL_OFF_ARMED,
            rxe::CONTROL_OFF_EVENTS, rxe::CONTROL_BYTES, rxe::RING_MIN_STRIDE,
            rxe::RING_MAX_STRIDE, rxe::WR_REG_MR;
        "FARLANE_": queue::WC_OPCODE_REGISTER;
    }
    out.push('\n');
    for (number, name) in rdma::VERBS_CALLS {
        let name = name.to_uppercase();
        let _ = writeln!(out, "#define FARLANE_CALL_{name} {number}");
    }
    out.push('\n');
    for text in [
        arena::CallHeader::c_declaration(),
        arena::AsyncEvent::c_declaration(),
        rdma::DeviceAttr::c_declaration(),
        rdma::DeviceLimits::c_declaration(),
        rdma::PortAttr::c_declaration(),
        rdma::PortCounters::c_declaration(),
        rdma::RegMr::c_declaration(),
        rdma::ReregMr::c_declaration(),
        rdma::Mr::c_declaration(),
        rdma::AllocMw::c_declaration(),
        rdma::Mw::c_declaration(),
        rdma::AllocFastMr::c_declaration(),
        rxe::RxeAddressed::c_declaration(),
        rxe::RxeRegister::c_declaration(),
        rdma::QpAttr::c_declaration(),
        rdma::ModifyQp::c_declaration(),
        rdma::Qp::c_declaration(),
        rdma::VersionRange::c_declaration(),
        rdma::CreateAh::c_declaration(),
        rdma::McastGroup::c_declaration(),
        rdma::Srq::c_declaration(),
        rdma::ModifySrq::c_declaration(),
        rdma::SrqAttr::c_declaration(),
        rdma::Ring::c_declaration(),
        rdma::ControlBlock::c_declaration(),
        rdma::CreateCqRing::c_declaration(),
        rdma::CreateQpRings::c_declaration(),
        rdma::CreateSrqRing::c_declaration(),
        rdma::MoveRing::c_declaration(),
    ] {
        out.push_str(&text);
        out.push('\n');
    }
    out.push_str("#endif\n");
    out
}

/// The text of `guest-driver/farlane_abi.h`.
#[must_use]
pub fn generate() -> String {
    let mut out = preamble("FARLANE_ABI_H");
    define! { out,
        "FARLANE_": config::VIRTIO_ID, config::MAGIC, config::ABI_VERSION, config::QUEUE_CONTROL,
            config::QUEUE_EVENT, config::QUEUE_DOORBELL, config::QUEUES, config::QUEUE_SIZE,
            config::WINDOW_SHMEM_ID, config::FEATURE_WINDOW, config::FEATURE_TUNNEL,
            config::FEATURE_VERBS;
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
    fn the_checked_in_headers_are_what_this_crate_generates() {
        let checked_in = include_str!("../../../guest-driver/farlane_abi.h");
        assert!(
            checked_in == super::generate(),
            "stale: cargo run -p farlane-abi --example c_header > guest-driver/farlane_abi.h"
        );
        let checked_in = include_str!("../../../guest-driver/farlane_verbs_abi.h");
        assert!(
            checked_in == super::generate_verbs(),
            "stale: cargo run -p farlane-abi --example c_header verbs > \
             guest-driver/farlane_verbs_abi.h"
        );
    }
}
