//! Names of numbers, in the words that rdma-core's own library uses: tests and log scrapers
//! compare them.

use std::ffi::{CStr, c_char};

/// `enum ibv_node_type`, from 1.
const NODE_TYPES: &[&CStr] = &[
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

/// `enum ibv_port_state`, from 0.
const PORT_STATES: &[&CStr] = &[
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

/// `enum ibv_event_type`, from 0.
const EVENT_TYPES: &[&CStr] = &[
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

/// `enum ibv_wc_status`, from 0.
const WC_STATUSES: &[&CStr] = &[
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

/// `enum ibv_wr_opcode`, from 0 (rdma-core 56).
const WR_OPCODES: &[&CStr] = &[
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"unknown",
    c"unknown",
    c"flush",
    c"atomic-write",
];

/// The text at `index`, `unknown` beyond the table.
fn text(table: &'static [&'static CStr], index: Option<usize>) -> *const c_char {
    index
        .and_then(|i| table.get(i))
        .copied()
        .unwrap_or(c"unknown")
        .as_ptr()
}

/// Name of an `enum ibv_node_type`.
#[must_use]
pub fn node_type(value: i32) -> *const c_char {
    text(
        NODE_TYPES,
        usize::try_from(value).ok().and_then(|v| v.checked_sub(1)),
    )
}

/// Name of an `enum ibv_port_state`.
#[must_use]
pub fn port_state(value: u32) -> *const c_char {
    text(PORT_STATES, usize::try_from(value).ok())
}

/// Name of an `enum ibv_event_type`.
#[must_use]
pub fn event_type(value: u32) -> *const c_char {
    text(EVENT_TYPES, usize::try_from(value).ok())
}

/// Name of an `enum ibv_wc_status`.
#[must_use]
pub fn wc_status(value: u32) -> *const c_char {
    text(WC_STATUSES, usize::try_from(value).ok())
}

/// Name of an `enum ibv_wr_opcode`.
#[must_use]
pub fn wr_opcode(value: u32) -> *const c_char {
    text(WR_OPCODES, usize::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: *const c_char) -> &'static str {
        // SAFETY: every text comes from a static table of C strings.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap()
    }

    #[test]
    fn texts_are_rdma_cores() {
        assert_eq!(read(wc_status(0)), "success");
        assert_eq!(read(wc_status(5)), "Work Request Flushed Error");
        assert_eq!(read(wc_status(23)), "TM software rendezvous");
        assert_eq!(read(event_type(8)), "local catastrophic error");
        assert_eq!(read(port_state(4)), "active");
        assert_eq!(read(node_type(1)), "InfiniBand channel adapter");
    }

    #[test]
    fn a_number_outside_its_table_is_unknown() {
        for text in [
            wc_status(24),
            event_type(20),
            port_state(6),
            node_type(0),
            node_type(-1),
            node_type(8),
            wc_status(u32::MAX),
        ] {
            assert_eq!(read(text), "unknown");
        }
    }
}
