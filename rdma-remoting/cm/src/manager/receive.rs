//! What comes in.

use super::Manager;
use crate::event::Ports;
use crate::message::{Mad, Malformed, Message, ParseError};
use std::time::Instant;

impl Manager {
    /// Takes a datagram that the network has brought from one port to another, to queue pair 1.
    /// What is no message of communication management, or of nothing that there is, changes
    /// nothing.
    ///
    /// # Errors
    /// [`Malformed`], which is for the log: nothing needs to be done.
    pub fn receive(
        &mut self,
        now: Instant,
        ports: Ports,
        datagram: &[u8],
    ) -> Result<(), Malformed> {
        let mad = match Mad::parse(datagram) {
            Ok(mad) => mad,
            Err(ParseError::Malformed(malformed)) => return Err(malformed),
            Err(ParseError::Refused(refusal)) => {
                self.refuse_req(ports, refusal.transaction, refusal.comm_id, refusal.reason);
                return Ok(());
            }
        };
        let transaction = mad.transaction;
        match &mad.message {
            Message::Req(req) => self.on_req(now, ports, transaction, req),
            Message::Mra(mra) => self.on_mra(now, ports, mra),
            Message::Rej(rej) => self.on_rej(now, ports, rej),
            Message::Rep(rep) => self.on_rep(now, ports, transaction, rep),
            Message::Rtu(rtu) => self.on_rtu(ports, rtu),
            Message::Dreq(dreq) => self.on_dreq(now, ports, transaction, dreq),
            Message::Drep(drep) => self.on_drep(now, ports, drep),
            Message::SidrReq(req) => self.on_sidr_req(now, ports, transaction, req),
            Message::SidrRep(rep) => self.on_sidr_rep(ports, rep),
        }
        Ok(())
    }
}
