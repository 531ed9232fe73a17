//! Attackers, each of one boundary of the product, for tests and scenarios: of lenders
//! ([`lending`]) and of vfio-user servers ([`vfio_user`]). The programs beside them attack the
//! guest device and its host socket (`farlane-attack-rdma`) and tokens (`farlane-attack-tokens`)
//! from a guest's process. `farlane-recorder` attacks nobody: it stands in the place of a backend,
//! writes down what a guest's driver tells it, and lets go of regions when a scenario wants it to.

pub mod lending;
mod random;
pub mod vfio_user;

pub use random::Random;
