//! By which opcode a send request is told, in its completion and by the probes.

use crate::request::{Opcode, SendWqe};
use farlane_abi::queue::{
    WC_OPCODE_ATOMIC_WRITE, WC_OPCODE_BIND_WINDOW, WC_OPCODE_COMPARE_SWAP, WC_OPCODE_FETCH_ADD,
    WC_OPCODE_FLUSH, WC_OPCODE_LOCAL_INVALIDATE, WC_OPCODE_RDMA_READ, WC_OPCODE_RDMA_WRITE,
    WC_OPCODE_REGISTER, WC_OPCODE_SEND,
};

/// The opcode that the probes tell of a request. One that makes no sense has none.
pub fn told_opcode(request: &SendWqe) -> u8 {
    /// No completion has it (`enum ibv_wc_opcode`).
    const NONE: u8 = u8::MAX;
    match request.is_bad() {
        true => NONE,
        false => wc_opcode(request.opcode),
    }
}

/// The opcode of a request's completion (`enum ibv_wc_opcode`).
pub fn wc_opcode(opcode: Opcode) -> u8 {
    match opcode {
        Opcode::Send | Opcode::SendImm | Opcode::SendInvalidate(_) => WC_OPCODE_SEND,
        Opcode::Write | Opcode::WriteImm => WC_OPCODE_RDMA_WRITE,
        Opcode::Read => WC_OPCODE_RDMA_READ,
        Opcode::CompareSwap { .. } => WC_OPCODE_COMPARE_SWAP,
        Opcode::FetchAdd { .. } => WC_OPCODE_FETCH_ADD,
        Opcode::LocalInvalidate(_) => WC_OPCODE_LOCAL_INVALIDATE,
        Opcode::Register(_) => WC_OPCODE_REGISTER,
        Opcode::Bind(_) => WC_OPCODE_BIND_WINDOW,
        Opcode::AtomicWrite => WC_OPCODE_ATOMIC_WRITE,
        Opcode::Flush(_) => WC_OPCODE_FLUSH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::WorkRequest as _;
    use farlane_abi::queue::{OP_RDMA_WRITE, OP_SEND, SEND_INLINE, SendEntry};
    use farlane_abi::zerocopy::IntoBytes as _;

    #[test]
    fn a_request_that_makes_no_sense_has_not_the_opcode_of_the_one_before() {
        let mut request = SendWqe::default();
        let mut told = |opcode, flags, bytes: u32| {
            let head = SendEntry {
                opcode,
                flags,
                inline_bytes: bytes.into(),
                ..Default::default()
            };
            let _ = request.parse(head.as_bytes());
            told_opcode(&request)
        };
        assert_eq!(told(OP_RDMA_WRITE, 0, 0), WC_OPCODE_RDMA_WRITE);
        assert_eq!(told(200, 0, 0), 255);
        // One whose opcode could be read, and whose data is missing.
        assert_eq!(told(OP_SEND, SEND_INLINE, 8), 255);
        assert_eq!(told(OP_SEND, 0, 0), WC_OPCODE_SEND);
    }
}
