//! Limits on lines that a client can cause at will.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::event::Event;

/// Lines at once.
const BURST: u32 = 32;

/// Time for one more.
const REFILL: Duration = Duration::from_secs(1);

/// Users with an allowance of their own; the rest share one.
const MAX_USERS: usize = 1024;

/// Refusals that each user may cause.
#[derive(Debug, Default)]
pub(super) struct Limits(Mutex<BTreeMap<Option<u32>, Allowance>>);

#[derive(Debug)]
struct Allowance {
    left: u32,
    since: Instant,
    suppressed: u64,
}

impl Limits {
    /// Whether `event` is written: how many like it were not, since the last that was.
    pub(super) fn allow(&self, event: &Event) -> Option<u64> {
        self.allow_at(event, Instant::now())
    }

    fn allow_at(&self, event: &Event, now: Instant) -> Option<u64> {
        if !matches!(event, Event::Refusal(_) | Event::ClaimRefused(_)) {
            return Some(0);
        }
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let uid = Some(event.by().uid);
        let key = if users.len() < MAX_USERS || users.contains_key(&uid) { uid } else { None };
        let fresh = || Allowance { left: BURST, since: now, suppressed: 0 };
        users.entry(key).or_insert_with(fresh).take(now)
    }
}

impl Allowance {
    fn take(&mut self, now: Instant) -> Option<u64> {
        let refills = now.saturating_duration_since(self.since).as_millis() / REFILL.as_millis();
        if refills > 0 {
            self.left = self.left.saturating_add(u32::try_from(refills).unwrap_or(BURST)).min(BURST);
            self.since = now;
        }
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed = self.suppressed.saturating_add(1);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::{Actor, Refusal};

    #[test]
    fn a_user_who_is_refused_without_end_is_counted_and_others_are_logged() {
        let refusal = |uid| {
            let by = Actor { uid, ..Actor::default() };
            Event::Refusal(Refusal { by, region: None, bytes: None, reason: "no".to_owned() })
        };
        let (limits, begun) = (Limits::default(), Instant::now());
        let logged = (0..1000).filter(|_| limits.allow_at(&refusal(1), begun).is_some()).count();
        assert_eq!(logged, 32);
        assert_eq!(limits.allow_at(&refusal(2), begun), Some(0));
        assert_eq!(limits.allow_at(&refusal(1), begun + REFILL), Some(968));
        assert_eq!(limits.allow_at(&refusal(1), begun + REFILL), None);
        let many = (0..100_000).filter(|uid| limits.allow_at(&refusal(*uid), begun + REFILL).is_some());
        assert!(many.count() < MAX_USERS + 64, "one process of many users");
        assert!(limits.0.lock().unwrap().len() <= MAX_USERS + 1);
    }
}
