//! What programs that do not trust each other share of one port.

use super::*;
use farlane_abi::width::to_u64;

/// Has a program listen at ports from this one on, until it may have no more. Returns how many.
fn listen_until_refused(program: &Program, first_port: u64) -> usize {
    let service = SERVICE & !0xffff;
    let ids = (first_port..0xffff).map(|port| {
        let id = program.bind(service | port)?.id;
        let backlog = 1.into();
        program.call().cm_listen(CmListen { id, backlog })
    });
    ids.take_while(|listening| *listening != Err(Errno::ENOMEM))
        .inspect(|listening| assert_eq!(*listening, Ok(())))
        .count()
}

#[test]
fn a_user_leaves_listeners_of_its_port_to_another() {
    let (_server, client, _) = two(PortConfig::default());
    let users = [1, 2].map(|_| client.port.another_party());
    let program = |user: usize, context| {
        let events = Arc::<Counted>::default();
        let sink = Arc::clone(&events) as Arc<dyn EventSink>;
        let number = ContextId::new(context).unwrap();
        let context = client.port.open_for(&users[user], number, sink, None);
        Program::of(&client.port, context.unwrap(), events)
    };
    let greedy = program(0, 2);
    let taken = listen_until_refused(&greedy, 1);
    let other = program(1, 3);
    // What was refused to the other one is bound.
    let left = listen_until_refused(&other, 2 + to_u64(taken));
    assert!(left >= taken / 3, "{taken} are taken, and {left} were left");
}
