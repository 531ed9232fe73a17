//! Posting work. No allocation, no call: a request goes straight into the shared queue.

use crate::address;
use crate::errno::fail;
use crate::sys::*;
use crate::window::Binding;
use crate::{queue_pair, srq};
use farlane_abi::Errno;
use farlane_abi::queue::{
    MAX_SGE, OP_ATOMIC_WRITE, OP_BIND_WINDOW, OP_COMPARE_SWAP, OP_FETCH_ADD, OP_LOCAL_INVALIDATE,
    OP_RDMA_READ, OP_RDMA_WRITE, OP_RDMA_WRITE_IMM, OP_SEND, OP_SEND_IMM, OP_SEND_INVALIDATE,
    SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED,
};
use farlane_abi::width::to_usize;
use farlane_rdma_client::{
    Payload, RecvQueue, RecvRequest, SendQueue, SendRequest, SendTail, Sge, VerbsVersion,
};
use std::ffi::c_int;
use std::mem::offset_of;

/// Most elements of a request, as a length.
const ELEMENTS: usize = MAX_SGE as usize;

/// Flags that a send request may have; checksum offload is for other types of queue pairs.
const SEND_FLAGS: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;

// An element is the same bytes in C and in the shared queue.
const _: () = assert!(
    size_of::<ibv_sge>() == size_of::<Sge>()
        && align_of::<Sge>() <= align_of::<ibv_sge>()
        && offset_of!(ibv_sge, addr) == offset_of!(Sge, addr)
        && offset_of!(ibv_sge, length) == offset_of!(Sge, length)
        && offset_of!(ibv_sge, lkey) == offset_of!(Sge, lkey)
);

/// The elements of a request.
#[inline]
pub(crate) unsafe fn elements<'a>(list: *const ibv_sge, count: c_int) -> Result<&'a [Sge], Errno> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        Ok(count) if count <= ELEMENTS => {
            // SAFETY: by the caller's contract the list has `count` elements, of the same layout
            // as ours (asserted above).
            Ok(unsafe { std::slice::from_raw_parts(list.cast(), count) })
        }
        _ => Err(Errno::EINVAL),
    }
}

/// The opcode on the wire of an operation that all versions have; `EOPNOTSUPP` for others.
#[inline]
fn opcode(opcode: ibv_wr_opcode) -> Result<u8, Errno> {
    match opcode {
        IBV_WR_RDMA_WRITE => Ok(OP_RDMA_WRITE),
        IBV_WR_RDMA_WRITE_WITH_IMM => Ok(OP_RDMA_WRITE_IMM),
        IBV_WR_SEND => Ok(OP_SEND),
        IBV_WR_SEND_WITH_IMM => Ok(OP_SEND_IMM),
        IBV_WR_RDMA_READ => Ok(OP_RDMA_READ),
        _ => Err(Errno::EOPNOTSUPP),
    }
}

/// The flags on the wire.
#[inline]
pub(crate) fn flags(flags: u32) -> Result<u8, Errno> {
    if flags & !SEND_FLAGS != 0 {
        return Err(Errno::EINVAL);
    }
    let bit = |ours: u8, theirs: u32| if flags & theirs != 0 { ours } else { 0 };
    Ok(bit(SEND_FENCE, IBV_SEND_FENCE)
        | bit(SEND_SIGNALED, IBV_SEND_SIGNALED)
        | bit(SEND_SOLICITED, IBV_SEND_SOLICITED))
}

/// What a request asks for that is not in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operation {
    opcode: u8,
    imm: u32,
    remote_addr: u64,
    rkey: u32,
    tail: Option<SendTail>,
    /// It moves bytes, and so names memory of this side.
    has_data: bool,
}

impl Operation {
    /// One that has neither operands nor memory at the peer.
    fn new(opcode: u8, imm: u32) -> Self {
        Self {
            opcode,
            imm,
            remote_addr: 0,
            rkey: 0,
            tail: None,
            has_data: true,
        }
    }
}

/// The operation of a request whose opcode is not one of [all versions](opcode).
///
/// # Safety
/// That of a request that binds a window names a window and a region, or NULL.
#[cold]
unsafe fn operation(version: VerbsVersion, wr: &ibv_send_wr) -> Result<Operation, Errno> {
    if version < VerbsVersion::V2 {
        return Err(Errno::EOPNOTSUPP);
    }
    // SAFETY: the unions hold plain numbers and pointers, whichever variant was written.
    let (key, rdma, word, window) = unsafe {
        (
            wr.imm.invalidate_rkey,
            wr.wr.rdma,
            wr.wr.atomic,
            wr.extra.bind_mw,
        )
    };
    let atomic = |opcode, b: u64| Operation {
        remote_addr: word.remote_addr,
        rkey: word.rkey,
        tail: Some(SendTail {
            a: word.compare_add.into(),
            b: b.into(),
        }),
        ..Operation::new(opcode, 0)
    };
    match wr.opcode {
        IBV_WR_ATOMIC_CMP_AND_SWP => Ok(atomic(OP_COMPARE_SWAP, word.swap)),
        IBV_WR_ATOMIC_FETCH_AND_ADD => Ok(atomic(OP_FETCH_ADD, 0)),
        IBV_WR_ATOMIC_WRITE => Ok(Operation {
            remote_addr: rdma.remote_addr,
            rkey: rdma.rkey,
            ..Operation::new(OP_ATOMIC_WRITE, 0)
        }),
        IBV_WR_SEND_WITH_INV => Ok(Operation::new(OP_SEND_INVALIDATE, key)),
        IBV_WR_LOCAL_INV => Ok(Operation {
            has_data: false,
            ..Operation::new(OP_LOCAL_INVALIDATE, key)
        }),
        IBV_WR_BIND_MW => {
            let info = &window.bind_info;
            // SAFETY: by the caller's contract.
            let binding = unsafe { Binding::new(window.mw, IBV_MW_TYPE_2, window.rkey, info)? };
            Ok(Operation {
                remote_addr: binding.address,
                rkey: binding.rkey,
                tail: Some(binding.tail),
                has_data: false,
                ..Operation::new(OP_BIND_WINDOW, binding.window)
            })
        }
        _ => Err(Errno::EOPNOTSUPP),
    }
}

/// Writes one send request into the queue, of a queue pair whose requests say whom they are for
/// where it `is_addressed`.
#[inline]
unsafe fn push_send(
    queue: &mut SendQueue<'_>,
    wr: &ibv_send_wr,
    is_addressed: bool,
) -> Result<(), Errno> {
    let (opcode, extra) = match opcode(wr.opcode) {
        Ok(opcode) => (opcode, None),
        // Of their unions only the datagram's variant was written.
        Err(errno) if is_addressed => return Err(errno),
        Err(_) => {
            // SAFETY: by the caller's contract.
            let operation = unsafe { operation(queue.version(), wr)? };
            (operation.opcode, Some(operation))
        }
    };
    // SAFETY: by the caller's contract. The unions hold plain numbers, whichever variant was
    // written; for a request that is not RDMA the backend ignores these.
    let (sges, imm, rdma) = unsafe {
        (
            elements(wr.sg_list, wr.num_sge)?,
            wr.imm.imm_data,
            wr.wr.rdma,
        )
    };
    let mut request = SendRequest {
        wr_id: wr.wr_id,
        opcode,
        flags: flags(wr.send_flags)?,
        imm,
        remote_addr: rdma.remote_addr,
        rkey: rdma.rkey,
        payload: Payload::Gather(sges),
    };
    let mut tail = match is_addressed {
        false => None,
        true => {
            // Of the union only the datagram's variant was written.
            (request.remote_addr, request.rkey) = (0, 0);
            // SAFETY: by the caller's contract.
            let ud = unsafe { wr.wr.ud };
            // SAFETY: as above.
            let handle = unsafe { address::handle(ud.ah)? };
            Some(SendTail::datagram(handle, ud.remote_qpn, ud.remote_qkey))
        }
    };
    if let Some(operation) = extra {
        request.imm = operation.imm;
        request.remote_addr = operation.remote_addr;
        request.rkey = operation.rkey;
        tail = operation.tail;
        if !operation.has_data {
            request.payload = Payload::Gather(&[]);
        }
    }
    // SAFETY: by the caller's contract; a plain number.
    let number = unsafe { wr.qp_type.xrc.remote_srqn };
    let named = queue.names_queues().then_some(number);
    let mut push = |request: &SendRequest<'_>| match (named, &tail) {
        (Some(srq), tail) => queue.push_to(srq, request, tail.as_ref()),
        (None, None) => queue.push(request),
        (None, Some(tail)) => queue.push_with(request, tail),
    };
    if wr.send_flags & IBV_SEND_INLINE == 0 {
        push(&request)?;
        if opcode == OP_BIND_WINDOW {
            // SAFETY: by the caller's contract: a window, which was looked at above.
            unsafe { (*wr.extra.bind_mw.mw).rkey = request.rkey };
        }
        return Ok(());
    }
    let mut pieces: [&[u8]; ELEMENTS] = [&[]; ELEMENTS];
    for (piece, sge) in pieces.iter_mut().zip(sges) {
        // SAFETY: by the caller's contract: the data of an inline request is read now.
        *piece = unsafe { inline(sge)? };
    }
    request.payload = Payload::Inline(pieces.get(..sges.len()).ok_or(Errno::EINVAL)?);
    push(&request)
}

/// The memory of an element of an inline request; the key is ignored.
#[inline]
unsafe fn inline<'a>(sge: &Sge) -> Result<&'a [u8], Errno> {
    let length = to_usize(sge.length.get().into());
    if length == 0 {
        return Ok(&[]);
    }
    let address = std::ptr::with_exposed_provenance::<u8>(to_usize(sge.addr.get()));
    if address.is_null() {
        return Err(Errno::EINVAL);
    }
    // SAFETY: by the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts(address, length) })
}

/// Answers a post: of one that has failed the program is told the request.
///
/// # Safety
/// `bad_wr` may be written.
#[inline]
unsafe fn posted<T>(result: Result<(), Errno>, wr: *mut T, bad_wr: *mut *mut T) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            // SAFETY: as promised by the caller.
            unsafe { bad_wr.write(wr) };
            fail(errno.raw_os_error())
        }
    }
}

/// `ibv_post_send`. Requests before the one that fails are posted.
pub unsafe extern "C" fn send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: by the caller's contract.
    let state = unsafe { queue_pair::state(qp) };
    let result = state.qp.send_queue().and_then(|mut queue| {
        while !wr.is_null() {
            // SAFETY: by the caller's contract a chain of valid requests.
            unsafe {
                push_send(&mut queue, &*wr, state.is_addressed)?;
                wr = (*wr).next;
            }
        }
        Ok(())
    });
    // SAFETY: by the caller's contract.
    unsafe { posted(result, wr, bad_wr) }
}

/// `ibv_post_recv`. Requests before the one that fails are posted.
pub unsafe extern "C" fn recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { receive(queue_pair::state(qp).qp.recv_queue(), wr, bad_wr) }
}

/// Posts a chain of receive requests.
///
/// # Safety
/// That of `ibv_post_recv` for the chain and `bad_wr`.
#[inline]
unsafe fn receive(
    queue: Result<RecvQueue<'_>, Errno>,
    mut wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let result = queue.and_then(|mut queue| {
        while !wr.is_null() {
            // SAFETY: by the caller's contract a chain of valid requests.
            unsafe {
                queue.push(&RecvRequest {
                    wr_id: (*wr).wr_id,
                    scatter: elements((*wr).sg_list, (*wr).num_sge)?,
                })?;
                wr = (*wr).next;
            }
        }
        Ok(())
    });
    // SAFETY: by the caller's contract.
    unsafe { posted(result, wr, bad_wr) }
}

/// `ibv_post_srq_recv`. Requests before the one that fails are posted.
pub unsafe extern "C" fn srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: by the caller's contract.
    unsafe { receive(srq::state(srq).srq.recv_queue(), wr, bad_wr) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Plain as _;

    #[test]
    fn flags_and_opcodes_get_their_numbers_on_the_wire() {
        assert_eq!(
            flags(IBV_SEND_SIGNALED | IBV_SEND_INLINE),
            Ok(SEND_SIGNALED)
        );
        assert_eq!(
            flags(IBV_SEND_FENCE | IBV_SEND_SOLICITED),
            Ok(SEND_FENCE | SEND_SOLICITED)
        );
        assert_eq!(flags(IBV_SEND_IP_CSUM), Err(Errno::EINVAL));
        assert_eq!(opcode(IBV_WR_RDMA_READ), Ok(OP_RDMA_READ));
        assert_eq!(opcode(IBV_WR_ATOMIC_FETCH_AND_ADD), Err(Errno::EOPNOTSUPP));
        assert_eq!(opcode(IBV_WR_DRIVER1), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn an_atomic_operation_is_read_as_c_wrote_it() {
        let mut wr = ibv_send_wr::zeroed();
        wr.wr.atomic = ibv_send_wr_atomic {
            remote_addr: 1 << 40,
            compare_add: u64::MAX - 1,
            swap: 3,
            rkey: 7,
        };
        let expected = |opcode, b: u64| {
            Ok(Operation {
                remote_addr: 1 << 40,
                rkey: 7,
                tail: Some(SendTail {
                    a: (u64::MAX - 1).into(),
                    b: b.into(),
                }),
                ..Operation::new(opcode, 0)
            })
        };
        // SAFETY: it binds no window.
        let operation = |version, wr: &ibv_send_wr| unsafe { operation(version, wr) };
        wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
        assert_eq!(
            operation(VerbsVersion::V2, &wr),
            expected(OP_COMPARE_SWAP, 3)
        );
        assert_eq!(operation(VerbsVersion::V1, &wr), Err(Errno::EOPNOTSUPP));
        wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
        assert_eq!(operation(VerbsVersion::V2, &wr), expected(OP_FETCH_ADD, 0));
        wr.opcode = IBV_WR_ATOMIC_WRITE;
        wr.wr.rdma = ibv_send_wr_rdma {
            remote_addr: 8,
            rkey: 9,
        };
        let write = operation(VerbsVersion::V2, &wr).unwrap();
        assert_eq!((write.remote_addr, write.rkey, write.tail), (8, 9, None));
        wr.opcode = IBV_WR_DRIVER1;
        assert_eq!(operation(VerbsVersion::V2, &wr), Err(Errno::EOPNOTSUPP));
    }

    #[test]
    fn a_request_that_invalidates_has_a_key_and_data_where_it_sends_some() {
        let mut wr = ibv_send_wr::zeroed();
        wr.imm.invalidate_rkey = 0x1234_5678;
        for (opcode, wire, has_data) in [
            (IBV_WR_SEND_WITH_INV, OP_SEND_INVALIDATE, true),
            (IBV_WR_LOCAL_INV, OP_LOCAL_INVALIDATE, false),
        ] {
            wr.opcode = opcode;
            // SAFETY: it binds no window.
            let operation = unsafe { operation(VerbsVersion::V2, &wr) }.unwrap();
            assert_eq!((operation.opcode, operation.imm), (wire, 0x1234_5678));
            assert_eq!((operation.has_data, operation.tail), (has_data, None));
        }
        wr.opcode = IBV_WR_BIND_MW;
        // SAFETY: it names no window.
        let nothing = unsafe { operation(VerbsVersion::V2, &wr) };
        assert_eq!(nothing, Err(Errno::EINVAL));
    }

    #[test]
    fn a_list_that_is_too_long_is_refused_before_it_is_read() {
        // SAFETY: neither call reads the list.
        unsafe {
            assert!(elements(std::ptr::null(), 0).unwrap().is_empty());
            for count in [-1, c_int::MIN, 17, c_int::MAX] {
                assert_eq!(elements(std::ptr::null(), count), Err(Errno::EINVAL));
            }
        }
    }

    #[test]
    fn elements_are_read_as_c_wrote_them() {
        let list = [
            ibv_sge {
                addr: 0x1234_5678_9abc,
                length: 8,
                lkey: 3,
            },
            ibv_sge {
                addr: 1,
                length: u32::MAX,
                lkey: 4,
            },
        ];
        // SAFETY: the list has two elements.
        let sges = unsafe { elements(list.as_ptr(), 2) }.unwrap();
        assert_eq!(sges[0].addr.get(), 0x1234_5678_9abc);
        assert_eq!((sges[1].length.get(), sges[1].lkey.get()), (u32::MAX, 4));
    }
}
