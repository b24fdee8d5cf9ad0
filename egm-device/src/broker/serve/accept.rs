//! Acceptance of clients.

use std::io;
use std::os::fd::AsFd;

use rustix::event::epoll;
use rustix::net::SocketFlags;

use super::Server;
use crate::audit::Actor;
use crate::broker::link::{Link, watch};
use crate::broker::serve::LISTENER;
use crate::broker::session::Key;
use crate::broker::wire::{self, Reply, Request};
use crate::broker::{packet, peer};
use crate::owner::{Owner, started};

impl Server {
    /// Accepts or refuses one client.
    pub(super) fn accept(&mut self) -> io::Result<()> {
        let socket =
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => socket,
                // No descriptor, or no memory, for a client that epoll would report again and again.
                Err(
                    rustix::io::Errno::MFILE
                    | rustix::io::Errno::NFILE
                    | rustix::io::Errno::NOMEM
                    | rustix::io::Errno::NOBUFS,
                ) => {
                    self.is_paused = true;
                    return Ok(epoll::delete(&self.epoll, &self.listener)?);
                }
                Err(_) => return Ok(()), // it is gone already
            };
        // A client that cannot be identified is not served: its socket closes here.
        let Ok(identity) = peer::identify(socket.as_fd()) else { return Ok(()) };
        let begun = started(identity.pid).unwrap_or(0);
        let owner = Owner {
            name: String::new(),
            uid: identity.peer.uid,
            pid: identity.pid,
            started: begun,
            domain: None,
        };
        let link = Link::new(socket, identity.process, Actor::of(&owner));
        match self.sessions.connected(identity.peer, identity.pid, begun) {
            Ok(key) => {
                let watched = link.watch(&self.epoll, key);
                self.links.insert(key, link);
                if watched.is_err() {
                    self.close(key);
                    self.process_ended(key);
                }
            }
            Err(refused) => {
                self.source.audit().write(&link.refusal(&refused));
                let reply = wire::encode(&Reply::Refused(refused));
                let _ = link.socket.map(|socket| packet::send(socket.as_fd(), &reply, &[]));
            }
        }
        Ok(())
    }

    /// Accepts clients again after it ran out of descriptors.
    pub(super) fn resume(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.is_paused) {
            watch(&self.epoll, self.listener.as_fd(), LISTENER)?;
        }
        Ok(())
    }

    /// Keeps a client's request for the audit log.
    pub(super) fn asked(&mut self, key: Key, request: &Request) {
        if let (Request::Take(take), Some(link)) = (request, self.links.get_mut(&key)) {
            link.asked = Some(take.clone());
        }
    }
}
