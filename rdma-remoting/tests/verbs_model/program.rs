//! What a random program is made of.

use crate::rig::*;
use crate::{EVERYTHING, MEMORY, OTHER_PD, PD, QKEYS};
use farlane_abi::rdma::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Which queue pairs there are.
#[derive(Clone, Copy, Debug)]
pub enum Scenery {
    /// Two that are connected, of this kind.
    Pair { kind: u32 },
    /// Two connections of this kind, whose second ends take from a queue of this protection domain.
    Shared { kind: u32, pd: u32 },
    /// Two extended connections to targets in a domain with two shared receive queues.
    Extended,
    /// Three for datagrams, of which the last one takes from a shared receive queue.
    Datagrams,
}

impl Scenery {
    /// Kinds of queue pairs, whose they are, to whom they are connected, and whether they share
    /// their receive requests.
    pub fn queue_pairs(self) -> Vec<(u32, usize, usize, bool)> {
        match self {
            Self::Pair { kind } => vec![(kind, 0, 1, false), (kind, 1, 0, false)],
            Self::Shared { kind, .. } => vec![
                (kind, 0, 1, false),
                (kind, 1, 0, true),
                (kind, 0, 3, false),
                (kind, 1, 2, true),
            ],
            Self::Extended => vec![
                (QPT_XRC_SEND, 0, 1, false),
                (QPT_XRC_RECV, 1, 0, true),
                (QPT_XRC_SEND, 0, 3, false),
                (QPT_XRC_RECV, 1, 2, true),
            ],
            Self::Datagrams => {
                vec![
                    (QPT_UD, 0, 0, false),
                    (QPT_UD, 1, 1, false),
                    (QPT_UD, 2, 2, true),
                ]
            }
        }
    }

    /// Protection domains of shared receive queues.
    pub fn shared(self) -> &'static [u32] {
        match self {
            Self::Pair { .. } => &[],
            Self::Shared { pd: PD, .. } => &[PD],
            Self::Shared { .. } | Self::Datagrams => &[OTHER_PD],
            Self::Extended => &[PD, OTHER_PD],
        }
    }
}

/// A key of one side, of the kinds that there are.
#[derive(Clone, Copy, Debug)]
pub enum Key {
    Everything,
    Readable,
    OfAnotherDomain,
    Nothing,
    /// Of its window of type 1 or 2, as it is after all that was posted.
    Window(usize),
    /// The one before.
    EarlierWindow(usize),
}

/// A piece of memory as a request names it, from an offset.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub key: Key,
    pub at: u64,
    pub length: u32,
}

#[derive(Clone, Copy, Debug)]
pub enum Operation {
    Send,
    SendImm,
    SendInvalidate(Key),
    Write,
    WriteImm,
    Read,
    CompareSwap {
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        add: u64,
    },
    AtomicWrite,
    /// Of what a piece says, or of all that its key names.
    Flush {
        is_persistent: bool,
        is_range: bool,
    },
    LocalInvalidate(Key),
    Bind {
        window: usize,
        to: Piece,
        access: u32,
    },
}

/// How a datagram names its receiver.
#[derive(Clone, Copy, Debug)]
pub enum By {
    Gid,
    Lid,
    /// One of the two groups.
    Group(u8),
    /// No port is called so.
    Nothing,
}

/// Whom a request is for, where its transport has it say that.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// Which queue pair or shared receive queue; beyond the last one, one that is not there.
    pub to: usize,
    pub by: By,
    pub qkey: u32,
}

#[derive(Clone, Debug)]
pub enum Step {
    /// To a queue of a queue pair, or one that several share.
    Receive {
        queue: usize,
        into: Vec<Piece>,
    },
    Send {
        who: usize,
        operation: Operation,
        local: Vec<Piece>,
        remote: Piece,
        signalled: bool,
        inline: bool,
        address: Address,
    },
    /// Turns until nothing is to be done.
    Rest,
    /// All timers expire.
    Expire,
    /// All connections are made anew.
    Reconnect,
    /// A queue pair goes on after an error of its own.
    Resume {
        who: usize,
    },
    /// A shared receive queue tells when fewer requests are left than this.
    Limit {
        queue: usize,
        limit: u8,
    },
    /// A queue of a domain is destroyed, and another one made.
    Renew {
        queue: usize,
    },
    /// A queue pair comes into a group, or leaves it.
    Attach {
        who: usize,
        group: u8,
    },
    Detach {
        who: usize,
        group: u8,
    },
    /// A queue pair has another Q_Key.
    Qkey {
        who: usize,
        qkey: u32,
    },
}

/// One that opens memory mostly, where windows do in so many of 20 cases.
pub fn key(windows: u32) -> impl Strategy<Value = Key> {
    prop_oneof![
        20 - windows => Just(Key::Everything),
        windows + 1 => (0usize..2).prop_map(Key::Window),
        1 => prop_oneof![
            Just(Key::Readable),
            Just(Key::OfAnotherDomain),
            Just(Key::Nothing),
            (0usize..2).prop_map(Key::EarlierWindow),
        ],
    ]
}

/// Mostly inside of the memory, and mostly words.
pub fn piece(key: impl Strategy<Value = Key>) -> impl Strategy<Value = Piece> {
    let at = prop_oneof![
        20 => (0..MEMORY / 8 - 1).prop_map(|word| u64::from(word * 8)),
        3 => 0..u64::from(MEMORY) + 16,
        1 => Just(u64::MAX - IOVA - 3),
    ];
    let length = prop_oneof![16 => Just(8u32), 6 => 0u32..16, 1 => Just(u32::from(MEMORY))];
    (key, at, length).prop_map(|(key, at, length)| Piece { key, at, length })
}

/// Memory of one's own: mostly a word.
pub fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    prop_oneof![3 => vec(piece(key(0)), 1..2), 2 => vec(piece(key(0)), 0..3)]
}

pub fn operation() -> impl Strategy<Value = Operation> {
    let access = prop_oneof![
        6 => Just(EVERYTHING & !ACCESS_MW_BIND),
        1 => Just(ACCESS_REMOTE_READ),
        1 => 0u32..64,
        1 => Just(ACCESS_FLUSH_GLOBAL),
    ];
    // What can be invalidated is a window of type 2.
    let second = || prop_oneof![5 => Just(Key::Window(1)), 1 => key(10)];
    prop_oneof![
        6 => Just(Operation::Send),
        2 => Just(Operation::SendImm),
        2 => second().prop_map(Operation::SendInvalidate),
        5 => Just(Operation::Write),
        2 => Just(Operation::WriteImm),
        4 => Just(Operation::Read),
        3 => (0u64..3, 0u64..3)
            .prop_map(|(compare, swap)| Operation::CompareSwap { compare, swap }),
        3 => (0u64..3).prop_map(|add| Operation::FetchAdd { add }),
        3 => Just(Operation::AtomicWrite),
        3 => (prop::bool::weighted(0.1), any::<bool>())
            .prop_map(|(is_persistent, is_range)| Operation::Flush { is_persistent, is_range }),
        1 => second().prop_map(Operation::LocalInvalidate),
        5 => (0usize..2, piece(key(0)), access)
            .prop_map(|(window, to, access)| Operation::Bind { window, to, access }),
    ]
}

pub fn address() -> impl Strategy<Value = Address> {
    let by = prop_oneof![
        4 => Just(By::Gid),
        2 => Just(By::Lid),
        4 => (0u8..2).prop_map(By::Group),
        1 => Just(By::Nothing),
    ];
    let qkey = prop_oneof![6 => Just(QKEYS[0]), 1 => Just(QKEYS[1]), 2 => Just(1u32 << 31)];
    (0usize..13, by, qkey).prop_map(|(to, by, qkey)| Address { to, by, qkey })
}

pub fn step() -> impl Strategy<Value = Step> {
    let who = || 0usize..4;
    let qkey = prop_oneof![2 => Just(QKEYS[0]), 1 => Just(QKEYS[1]), 1 => Just(QKEYS[2])];
    let send = (
        who(),
        operation(),
        pieces(),
        piece(key(7)),
        any::<bool>(),
        0..8u8,
        address(),
    );
    prop_oneof![
        8 => (0usize..8, pieces()).prop_map(|(queue, into)| Step::Receive { queue, into }),
        24 => send.prop_map(|(who, operation, local, remote, signalled, inline, address)| {
            let inline = inline == 0;
            Step::Send { who, operation, local, remote, signalled, inline, address }
        }),
        6 => Just(Step::Rest),
        1 => Just(Step::Expire),
        3 => Just(Step::Reconnect),
        1 => who().prop_map(|who| Step::Resume { who }),
        1 => (0usize..2, 0u8..4).prop_map(|(queue, limit)| Step::Limit { queue, limit }),
        1 => (0usize..2).prop_map(|queue| Step::Renew { queue }),
        2 => (who(), 0u8..2).prop_map(|(who, group)| Step::Attach { who, group }),
        1 => (who(), 0u8..2).prop_map(|(who, group)| Step::Detach { who, group }),
        1 => (who(), qkey).prop_map(|(who, qkey)| Step::Qkey { who, qkey }),
    ]
}

pub fn scenery() -> impl Strategy<Value = Scenery> {
    let kind = || prop_oneof![Just(QPT_RC), Just(QPT_UC)];
    let pd = prop_oneof![Just(PD), Just(OTHER_PD)];
    prop_oneof![
        2 => kind().prop_map(|kind| Scenery::Pair { kind }),
        2 => (kind(), pd).prop_map(|(kind, pd)| Scenery::Shared { kind, pd }),
        2 => Just(Scenery::Extended),
        2 => Just(Scenery::Datagrams),
    ]
}
