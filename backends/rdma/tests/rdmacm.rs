//! `librdmacm.so.1`, called as C programs do, at a running backend of their host.

#![allow(clippy::unwrap_used)]

#[path = "rdmacm/addresses.rs"]
mod addresses;
mod common;
#[path = "rdmacm/data.rs"]
mod data;
#[path = "rdmacm/moves.rs"]
mod moves;
#[path = "connections/program.rs"]
mod program;
#[path = "rdmacm/queues.rs"]
mod queues;
#[path = "rdmacm/removal.rs"]
mod removal;

use common::Backend;

/// Of one test, as the libraries look for the device once a process.
#[test]
fn a_program_connects_as_with_any_device() {
    let mut backend = Backend::start();
    // SAFETY: no other thread of this test looks at its environment.
    unsafe { std::env::set_var("FARLANE_SOCKET", backend.path("host")) };
    addresses::a_source_without_an_address_has_its_port_all_the_same();
    data::a_message_carries_as_much_as_there_is_room_for();
    data::a_rejection_says_why();
    data::a_synchronous_call_fails_where_nobody_listens();
    data::enhanced_connection_establishment_is_refused();
    queues::a_shared_receive_queue_is_that_of_the_ids_queue_pair();
    queues::extended_connections_have_a_domain_of_their_own();
    moves::events_that_wait_move_with_their_id();
    moves::an_id_waits_for_itself_or_at_a_channel();
    removal::ids_of_a_device_that_goes_are_told_once(&mut backend);
    backend.assert_alive();
}
