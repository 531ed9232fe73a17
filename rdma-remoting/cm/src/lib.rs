//! Connection management of RDMA (IBTA vol. 1, chapter 12): its messages and its states, without
//! I/O.
//!
//! [`Manager`] has the connections of some ports, and what listens there. Nobody but its caller
//! sends, receives, or looks at a clock.
//! [`Mad::parse`] reads a datagram of a peer once, into a message of which every field is one that
//! it may be; [`Mad::write`] is the way back. [`ServiceId`] and [`IpHeader`] are those of the RDMA
//! IP CM service, by which `librdmacm` and the kernel's `rdma_cm` find ports.
//!
//! ```
//! use farlane_rdma_cm::{CommId, Mad, Message, PrivateData, Rtu, TransactionId};
//!
//! let ready = Mad {
//!     transaction: TransactionId(1),
//!     message: Message::Rtu(Rtu {
//!         local_comm_id: CommId(2),
//!         remote_comm_id: CommId(3),
//!         private_data: PrivateData::default(),
//!     }),
//! };
//! assert_eq!(Mad::parse(&ready.write()), Ok(ready));
//! ```

mod attributes;
mod bits;
mod connection;
mod event;
mod fields;
mod manager;
mod message;
mod orphans;
mod policy;
mod service;
mod shares;

pub use attributes::{QpInit, QpReadyToReceive, QpReadyToSend, Reliable};
pub use bits::{MAD_BYTES, attribute};
pub use event::{
    Accept, Answer, CallError, Connect, ConnectReply, ConnectRequest, Event, ListenerId, Ports,
    Resolve, Route, ServiceReply, ServiceRequest, Transmit,
};
pub use fields::{
    About, AdditionalInfo, CmRetries, CommId, Failover, FlowLabel, Gid, Guid, PacketRate, PathMtu,
    PrivateData, Psn, Qpn, RejectReason, RetryCount, ServiceLevel, SidrStatus, TimeExponent,
    Transport,
};
pub use manager::{Counts, Draw, Home, Manager};
pub use message::{
    Datagram, Drep, Dreq, Mad, Malformed, Message, Mra, ParseError, Path, Refusal, Rej, Rep, Req,
    Rtu, SidrRep, SidrReq, TransactionId,
};
pub use policy::Limits;
pub use service::{Addresses, IP_HEADER_BYTES, IpHeader, IpHeaderError, IpService, ServiceId};
pub use shares::Shares;
