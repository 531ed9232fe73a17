//! The context header: the first segment of every context.
//!
//! | offset | written by | what |
//! |---|---|---|
//! | [`OFF_OWNER`] | process on the backend's host, and its kernel | see below |
//! | [`OFF_BACKEND_STATE`] | backend | [`BACKEND_AWAKE`] or [`BACKEND_SLEEPING`] |
//! | [`OFF_DEAD`] | guest kernel, or the library's watcher | not zero: the backend is gone |
//! | [`OFF_CALLER_WAITING`] | process | not zero: a caller sleeps until [`EVENT_WAKE`] |
//! | [`OFF_CALL_SUBMITTED`] | process | calls put into the ring, free-running |
//! | [`OFF_CALL_COMPLETED`] | backend | calls answered, free-running |
//! | [`OFF_ASYNC_PRODUCED`] | backend | asynchronous events put into the ring, free-running |
//! | [`OFF_ASYNC_CONSUMED`] | process | asynchronous events taken, free-running |
//! | [`OFF_ASYNC_RING`] | backend | [`ASYNC_ENTRIES`] times [`AsyncEvent`] |
//! | [`OFF_CALL_RING`] | both | [`CALL_SLOTS`] call slots of [`CALL_SLOT_BYTES`] |
//! | [`OFF_RUNG_SUMMARY`] | both | a bit for each word of the next that is not zero |
//! | [`OFF_RUNG`] | both | a bit for each queue pair that was rung, by its [slot], and each SRQ |
//!
//! [slot]: crate::rdma::slot_of
//! [`EVENT_WAKE`]: crate::control::EVENT_WAKE
//!
//! Each word that one side writes and the other polls has a cache line of its own.
//!
//! **Sleeping.** The backend stores [`BACKEND_SLEEPING`], issues a full fence, looks at every ring
//! once more and only then sleeps. A process publishes its work, issues a full fence, loads the
//! state and rings the doorbell if it reads [`BACKEND_SLEEPING`]. One of the two sees the other.
//! A caller that stops spinning does the same with [`OFF_CALLER_WAITING`] and
//! [`OFF_CALL_COMPLETED`].
//!
//! **Owner.** Memory of a process of its own host is reached by the backend at its addresses, where
//! another program has other memory (`execve`). So the library puts the number of a thread of its
//! own here, and names the word to the kernel as a lock that this thread holds
//! (`set_robust_list(2)`). When the thread ends, which is before the process has any memory of
//! another program, the kernel puts [`OWNER_DIED`] here, and the backend touches no such memory any
//! more. In a VM, and in libraries that know nothing of it, the word is zero.
//!
//! **Asynchronous events.** Those that the ring has no room for wait in the backend. To a process
//! that has taken the last event of the ring this is work that it has published: it loads the
//! state, and rings, as above.
//!
//! **Rung queue pairs.** The backend looks at queue pairs that had something to do lately. At each
//! other one it does not look: it says so in
//! [`QP_OFF_BACKEND_STATE`](crate::queue::QP_OFF_BACKEND_STATE) as above, and a process that reads
//! [`BACKEND_SLEEPING`] there after it has published a request sets the queue pair's bit of
//! [`OFF_RUNG`], then the bit of that word in [`OFF_RUNG_SUMMARY`], and only then looks at
//! [`OFF_BACKEND_STATE`]. The backend clears in the reverse order, and then looks at the queues.
//! A shared receive queue has such a word, too, at the same place: it says [`BACKEND_SLEEPING`]
//! where somebody waits for a request and the backend does not look.

use crate::wire::wire;
use zerocopy::little_endian::U32;

/// Owner word.
pub const OFF_OWNER: usize = 0x000;
/// Backend state word.
pub const OFF_BACKEND_STATE: usize = 0x040;
/// Device-gone word.
pub const OFF_DEAD: usize = 0x080;
/// Caller-waiting word.
pub const OFF_CALLER_WAITING: usize = 0x0c0;
/// Calls submitted.
pub const OFF_CALL_SUBMITTED: usize = 0x100;
/// Calls completed.
pub const OFF_CALL_COMPLETED: usize = 0x140;
/// Asynchronous events produced.
pub const OFF_ASYNC_PRODUCED: usize = 0x180;
/// Asynchronous events consumed.
pub const OFF_ASYNC_CONSUMED: usize = 0x1c0;
/// Asynchronous event ring.
pub const OFF_ASYNC_RING: usize = 0x200;
/// Call ring.
pub const OFF_CALL_RING: usize = 0x1000;

/// Which words of [`OFF_RUNG`] are not zero: [`RUNG_WORDS`] bits, in words of 32.
pub const OFF_RUNG_SUMMARY: usize = 0x5000;
/// Queue pairs and shared receive queues that were rung: [`RUNG_WORDS`] words of 32 bits.
pub const OFF_RUNG: usize = 0x5040;
/// Words of [`OFF_RUNG`].
pub const RUNG_WORDS: usize = (crate::rdma::MAX_QPS + crate::rdma::MAX_SRQS) as usize / 32;

/// The bit by which the kernel says that the owner has ended: `FUTEX_OWNER_DIED` of
/// `<linux/futex.h>`.
pub const OWNER_DIED: u32 = 0x4000_0000;

/// The backend polls the rings of this context, or this queue pair.
pub const BACKEND_AWAKE: u32 = 0;
/// The backend must be woken by the doorbell.
pub const BACKEND_SLEEPING: u32 = 1;

/// Entries of the asynchronous event ring, a power of two.
pub const ASYNC_ENTRIES: u32 = 64;
/// Slots of the call ring, a power of two.
pub const CALL_SLOTS: u32 = 32;
/// Bytes of a call slot: [`CallHeader`], then arguments, or the result in their place.
pub const CALL_SLOT_BYTES: usize = 512;
/// Bytes of arguments or result that a slot can hold.
pub const CALL_PAYLOAD_BYTES: usize = CALL_SLOT_BYTES - size_of::<CallHeader>();
/// Length of the first segment in bytes.
pub const HEADER_SEGMENT_BYTES: u64 = 0x8000;

const _: () = assert!(
    OFF_ASYNC_RING + ASYNC_ENTRIES as usize * size_of::<AsyncEvent>() <= OFF_CALL_RING
        && OFF_CALL_RING as u64 + CALL_SLOTS as u64 * CALL_SLOT_BYTES as u64
            <= OFF_RUNG_SUMMARY as u64
        && OFF_RUNG_SUMMARY + RUNG_WORDS.div_ceil(8) <= OFF_RUNG
        && (OFF_RUNG + RUNG_WORDS * 4) as u64 <= HEADER_SEGMENT_BYTES
);

wire! {
    /// Head of a call slot.
    pub struct CallHeader as "farlane_call_header" {
        /// Number of the call in its table.
        pub number: U32,
        /// Bytes of arguments, or of the result.
        pub length: U32,
        /// Answer: zero, or an error number.
        pub status: U32,
        /// Zero.
        pub reserved: U32,
    }

    /// An asynchronous event, as verbs define them (`enum ibv_event_type`).
    pub struct AsyncEvent as "farlane_async_event" {
        /// `EVENT_*` of [`crate::rdma`].
        pub kind: U32,
        /// Handle of the object (QP or CQ), or the port number.
        pub object: U32,
        /// Zero.
        pub reserved: [U32; 2],
    }
}
