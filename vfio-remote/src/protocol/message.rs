//! What lender and borrower say to each other.
//!
//! A session belongs to one device of one VM. The borrower asks; the lender answers under the same
//! number. Whatever touches a device carries the fencing number of the lease it belongs to, so
//! that what is late is refused.

use farlane_abi::width::at_most;
use farlane_pci::{Area, Description, InterruptKind, Region};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use thiserror::Error;

/// Version of the protocol; both ends must have the same.
pub const VERSION: u32 = 7;

/// A time as messages have it; the longest that they can say for a longer one.
pub(crate) fn millis(time: Duration) -> u32 {
    at_most(time.as_millis(), u32::MAX)
}

/// Largest number of bytes that one message reads or writes.
pub const MAX_DATA_BYTES: usize = 32 << 10;
/// Largest message in bytes, see [`MAX_DATA_BYTES`].
pub const MAX_FRAME_BYTES: usize = MAX_DATA_BYTES + 16 * 1024;
/// Largest number of descriptors with one message.
pub const MAX_DESCRIPTORS: usize = 64;
/// Largest number of vectors in one [`Request::SetInterrupts`].
pub const MAX_VECTORS: usize = 64;
/// Largest number of words that one [`Request::Words`] reads.
pub const MAX_WORDS: usize = 256;
/// How many ranges of a device's memory are listed.
pub const MAX_LISTED_MAPPINGS: usize = 64;
/// How many other devices that a device reaches are listed.
pub const MAX_LISTED_PEERS: usize = 16;
/// Largest name of a host or device, in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// Number of a lease: greater than that of every earlier lease of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fence(pub u64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What the holder of a device shows to have its other devices reach it: random, new with each
/// lease, and told to nobody but the holder. Where the other device is of another lender, that one
/// shows it to the device's own lender.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerKey(pub [u8; 16]);

impl fmt::Debug for PeerKey {
    /// Without the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerKey(..)")
    }
}

/// From borrower to lender.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToLender {
    /// The first message.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Who asks: where there is TLS, a name that the certificate is valid for; on the lender's
        /// host, one that the user may have.
        name: String,
    },
    /// Something to be answered.
    Request {
        /// Number of the answer.
        id: u32,
        /// What is asked.
        request: Request,
    },
    /// A write to a register, which nobody waits for.
    Post {
        /// Number of the lease.
        fence: Fence,
        /// Region that is accessed.
        region: Region,
        /// Offset in bytes.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// Answers [`ToBorrower::MemoryRead`] and [`ToBorrower::MemoryWrite`].
    Memory {
        /// The number it came with.
        id: u32,
        /// Bytes read (none for a write), or an error number.
        result: Result<Vec<u8>, i32>,
    },
}

/// From lender to borrower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToBorrower {
    /// The first message.
    Welcome {
        /// [`VERSION`].
        version: u32,
        /// Name of the lender.
        name: String,
    },
    /// Answers [`ToLender::Request`].
    Reply {
        /// The number it came with.
        id: u32,
        /// The answer.
        result: Result<Reply, Refusal>,
    },
    /// A vector with [`Delivery::Message`] was raised, at least once.
    Interrupt {
        /// Number of the lease.
        fence: Fence,
        /// Kind of interrupt.
        kind: InterruptKind,
        /// Number of the vector.
        vector: u16,
    },
    /// The device is wanted back: it is taken away when the time is over.
    Revoking {
        /// Number of the lease.
        fence: Fence,
        /// How long, in milliseconds.
        grace_ms: u32,
    },
    /// The lease has ended without the borrower's doing. The device touches nothing of the borrower
    /// any more. Under a sublease: the device is to be reached no more, and [`Request::Return`]
    /// says that it is not.
    Ended {
        /// Number of the lease.
        fence: Fence,
    },
    /// The device reads memory with [`Place::Messages`], or the lender looks what a window should
    /// show.
    MemoryRead {
        /// Number of the answer.
        id: u32,
        /// Number of the lease.
        fence: Fence,
        /// Guest-physical address.
        address: u64,
        /// Bytes, at most [`MAX_DATA_BYTES`].
        length: u32,
    },
    /// The device writes memory with [`Place::Messages`].
    MemoryWrite {
        /// Number of the answer.
        id: u32,
        /// Number of the lease.
        fence: Fence,
        /// Guest-physical address.
        address: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// The lease is over, and the device has begun nothing since, but is still at what it had
    /// begun. Comes again and again, about once a second, also where the borrower has hung up,
    /// until [`Ended`](Self::Ended), the answer to [`Request::Return`] or the end of the session
    /// says that it has stopped.
    Stopping {
        /// Number of the lease.
        fence: Fence,
    },
}

/// Who may borrow what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Of each device, who may borrow it; empty for everybody who can connect.
    pub devices: BTreeMap<String, Vec<String>>,
    /// Of each window, whose devices may reach memory through it.
    pub windows: BTreeMap<String, Vec<String>>,
    /// Of each user of the host, the names under which it may borrow.
    pub users: BTreeMap<u32, Vec<String>>,
    /// Other lenders whose devices may reach those of this one.
    pub lenders: Vec<String>,
    /// How long a holder has to give a device back that is revoked, in milliseconds.
    pub grace_ms: u32,
}

/// What a borrower, or an administrator, asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// What is on offer, from the device with this number on.
    List {
        /// 0, and so on until there is no more.
        first: u32,
    },
    /// Takes a device from its holder.
    Revoke {
        /// Name of the device.
        device: String,
    },
    /// This session is for that device from now on. Does not touch it.
    Attach {
        /// Name of the device.
        device: String,
    },
    /// Takes the device: it is this session's alone, and reset.
    Take,
    /// Goes on holding it.
    Renew {
        /// Number of the lease.
        fence: Fence,
    },
    /// Gives it back. When this is answered, the device touches nothing of the borrower.
    Return {
        /// Number of the lease.
        fence: Fence,
    },
    /// Lets the device reach memory. Where that is the VM's own, behind a window between hosts, the
    /// lender reads words of it ([`ToBorrower::MemoryRead`]) before it answers, and again as long
    /// as it is mapped.
    Map {
        /// Number of the lease.
        fence: Fence,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// Whether it may write there.
        writable: bool,
        /// Where the memory is.
        place: Place,
        /// Other device whose memory it is; none for memory of the VM.
        peer: Option<PeerName>,
    },
    /// Takes memory away. When this is answered, the device does not touch it.
    Unmap {
        /// Number of the lease.
        fence: Fence,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Reads registers.
    Read {
        /// Number of the lease.
        fence: Fence,
        /// Region that is accessed.
        region: Region,
        /// Offset in bytes.
        offset: u64,
        /// Bytes, at most [`MAX_DATA_BYTES`].
        length: u32,
    },
    /// Says where vectors' interrupts go.
    SetInterrupts {
        /// Number of the lease.
        fence: Fence,
        /// Kind of interrupt.
        kind: InterruptKind,
        /// The first vector.
        first: u16,
        /// That and the following ones, at most [`MAX_VECTORS`].
        vectors: Vec<Delivery>,
    },
    /// Masks or unmasks INTx.
    MaskIntx {
        /// Number of the lease.
        fence: Fence,
        /// Whether it is silent.
        masked: bool,
    },
    /// Function-level reset.
    Reset {
        /// Number of the lease.
        fence: Fence,
    },
    /// Writes registers, and waits until that is done.
    Write {
        /// Number of the lease.
        fence: Fence,
        /// Region that is accessed.
        region: Region,
        /// Offset in bytes.
        offset: u64,
        /// The bytes, at most [`MAX_DATA_BYTES`].
        data: Vec<u8>,
    },
    /// Whether the device accesses memory that is mapped. It does when it is taken. What is then
    /// unmapped it does not fault on.
    SetBusMaster {
        /// Number of the lease.
        fence: Fence,
        /// Whether it may.
        may: bool,
    },
    /// Asked by a lender, for a device of its own that is to reach a device of this one through a
    /// window: this session is for a sublease of that from now on. It ends with the device's lease,
    /// and is renewed and returned as a lease is.
    Sublet {
        /// Name of the device that is to be reached.
        device: String,
        /// Key of the lease of that device.
        key: PeerKey,
    },
    /// Under a sublease: reads words of the device's memory, to compare what a window shows.
    /// Registers are not read.
    Words {
        /// Number of the lease.
        fence: Fence,
        /// Region that is accessed.
        region: Region,
        /// Offsets in bytes, at most [`MAX_WORDS`]: multiples of 8.
        offsets: Vec<u64>,
    },
    /// Has the lender go by another policy, if all else is as it was.
    Reload {
        /// Who may borrow what.
        policy: Policy,
        /// What else is configured, as texts, by what each is called.
        fixed: BTreeMap<String, String>,
    },
}

/// A device, for people: what a lender is told of another one's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerName {
    /// Its lender.
    pub lender: String,
    /// Its name there.
    pub device: String,
}

/// Where memory of a VM is, as the lender reaches it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// Behind a memory window of one of the bridges between the two.
    Window {
        /// Which, in the order of [`Attached::bridges`].
        bridge: u16,
        /// Its window.
        window: u32,
        /// Offset in the window, in bytes.
        offset: u64,
    },
    /// Behind this session: the lender asks for each access.
    Messages,
    /// In another device of the same lender.
    Device {
        /// Name of the device.
        device: String,
        /// A region of it.
        region: Region,
        /// Offset in the region, in bytes.
        offset: u64,
        /// Key of the lease of that device.
        key: PeerKey,
    },
    /// In a device of another lender, of which a bridge of this one shows a region from its
    /// beginning on. This one takes a sublease of that device, and reads words of it, before it
    /// answers.
    Peer {
        /// Which bridge, in the order of [`Attached::bridges`].
        bridge: u16,
        /// The region.
        region: Region,
        /// Offset in the region, in bytes.
        offset: u64,
        /// Of the other device's lease.
        key: PeerKey,
    },
}

/// How an interrupt gets to the borrower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Delivery {
    /// Not at all.
    Off,
    /// The next of the message's descriptors is an eventfd.
    Eventfd,
    /// By [`ToBorrower::Interrupt`].
    Message,
}

/// A bridge that the two have between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bridge {
    /// Memory of this host, shared: the next descriptor is the borrower's end.
    Shm,
    /// A bridge that both are configured with.
    Named(String),
}

/// An area of a region that the borrower maps; the next descriptor has its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappableArea {
    /// The region.
    pub region: Region,
    /// Where in the region.
    pub area: Area,
    /// Offset in the descriptor's file, in bytes.
    pub file_offset: u64,
}

/// Answers [`Request::Attach`]. Its descriptors are those of the bridges, then of the areas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The device.
    pub description: Description,
    /// All bridges.
    pub bridges: Vec<Bridge>,
    /// All areas.
    pub areas: Vec<MappableArea>,
}

/// Answers a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// It was done.
    Done,
    /// To [`Request::List`].
    Devices {
        /// As many as fit into a message.
        devices: Vec<DeviceStatus>,
        /// Whether there are more.
        more: bool,
    },
    /// To [`Request::Attach`].
    Attached(Box<Attached>),
    /// To [`Request::Take`].
    Taken {
        /// Number of the lease.
        fence: Fence,
        /// It ends when it has not been renewed for so long, in milliseconds.
        term_ms: u32,
        /// What shows that a device is the holder's.
        key: PeerKey,
    },
    /// To [`Request::Read`] and [`Request::Words`].
    Data(Vec<u8>),
    /// To [`Request::Sublet`].
    Sublet {
        /// Number of the device's lease.
        fence: Fence,
        /// The sublease ends when it has not been renewed for so long, in milliseconds.
        term_ms: u32,
    },
}

/// Why a request was not done.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
pub enum Refusal {
    /// No such device, or none for this borrower.
    #[error("There is no such device for {0}")]
    NoDevice(String),
    /// Somebody else holds it.
    #[error("{holder} holds it")]
    Busy {
        /// Name of the holder.
        holder: String,
    },
    /// The request belongs to a lease that has ended.
    #[error("Lease {0} has ended")]
    Ended(Fence),
    /// This is not the time for it.
    #[error("{0}")]
    Order(String),
    /// A value is out of its range.
    #[error("{0}")]
    Invalid(String),
    /// The device failed.
    #[error("The device failed: {0}")]
    Device(String),
    /// A window does not show the memory of the VM, or of its other device: whatever else it is, it
    /// is not the device's to reach.
    #[error("The window does not show the memory that it should: {0}")]
    Window(String),
    /// Only the administrator of the lender's host may ask that.
    #[error("Only the lender's own user and root may ask that, on its own host")]
    NotHere,
    /// It has been begun and takes a while, for what the device is at: to be asked again.
    #[error("The device is still at it")]
    InProgress,
    /// Something else than the policy is not what the lender was started with.
    #[error("{0} is not as it was: that changes only when the lender is started again")]
    Fixed(String),
}

/// A device on offer, for people and programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStatus {
    /// Name of the device.
    pub name: String,
    /// What it is.
    pub about: String,
    /// Who holds it.
    pub holder: Option<Holder>,
    /// Sessions that are attached to it, the holder's included.
    pub attached: u32,
    /// Who may borrow it; empty for everybody who can connect.
    pub borrowers: Vec<String>,
    /// Why it is not lent any more, until the lender starts again.
    pub quarantine: Option<String>,
}

/// Who holds a device, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the device.
    pub name: String,
    /// Number of the lease.
    pub fence: u64,
    /// For how many seconds.
    pub held_seconds: u64,
    /// Memory that the device reaches: the first [`MAX_LISTED_MAPPINGS`] ranges.
    pub mappings: Vec<MappingStatus>,
    /// How many ranges there are.
    pub mapping_count: u32,
    /// How many bytes they have.
    pub mapped_bytes: u64,
    /// How many bridges lie between the device and the memory it reaches most of: 0 for memory of
    /// the same host; none where it is reached by messages, or not at all.
    pub hops: Option<u32>,
    /// Other devices that the device reaches: the first [`MAX_LISTED_PEERS`].
    pub peers: Vec<PeerStatus>,
}

/// Another device that a device reaches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Name of the other device.
    pub peer: PeerName,
    /// How many bytes of it.
    pub bytes: u64,
    /// By which way: "same lender", "local", "via window NAME" or "messages".
    pub way: String,
    /// How many bridges lie between; none where it is reached by messages.
    pub hops: Option<u32>,
}

/// A range that a device reaches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingStatus {
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Whether it may write there.
    pub writable: bool,
    /// By which way: a bridge and its window ("shm 0"), or "messages".
    pub way: String,
}
