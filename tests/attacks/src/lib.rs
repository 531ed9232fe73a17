//! Attackers, each of one boundary of the product, for tests and scenarios: of lenders
//! ([`lending`]) and of vfio-user servers ([`vfio_user`]). The programs beside them attack the
//! guest device and its host socket (`farlane-attack-rdma`) and tokens (`farlane-attack-tokens`)
//! from a guest's process.

pub mod lending;
mod random;
pub mod vfio_user;

pub use random::Random;
