//! Limits on bytes of the log that a user can cause at will.
//!
//! A user has an allowance for each [`LineClass`]. Two of them, 90 MB a day together, go to the log's file, which
//! keeps 128 MiB; the third goes to the file of findings, too.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::event::Event;

/// Size of a full allowance, in bytes.
const BURST: u64 = 256 << 10;

/// Refill of an allowance, in bytes per second.
const REFILL: u64 = 512;

/// Allowances at most. Beyond it, the ones that are full again go; while none is, the rest share one.
const MAX: usize = 4096;

/// Events that share an allowance. Refusals take none from grants, and neither takes any from findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LineClass {
    /// Refusals, and claims that are refused.
    Refused,
    /// Grants, returns and scrubs. Root's have no limit.
    Done,
    /// Quarantines and their ends.
    Quarantined,
}

/// Key of an allowance. Peers that no rule names and users beyond [`MAX`] share the one of `None`.
type AllowanceKey = (LineClass, Option<u32>);

/// Bytes that each user may still cause.
#[derive(Debug, Default)]
pub(super) struct Limits(Mutex<BTreeMap<AllowanceKey, Allowance>>);

#[derive(Debug)]
struct Allowance {
    left: u64,
    since: Instant,
    suppressed: u64,
}

impl Limits {
    /// Whether `event`, a line of `size` bytes, is written: how many like it were not, since the last that was.
    pub(super) fn allow(&self, event: &Event, size: usize) -> Option<u64> {
        self.allow_at(event, size, Instant::now())
    }

    fn allow_at(&self, event: &Event, size: usize, now: Instant) -> Option<u64> {
        let Some(class) = LineClass::of(event) else { return Some(0) };
        let is_known = !matches!(event, Event::Refusal(refusal) if refusal.region.is_none());
        let shared = (class, None);
        let own = if is_known { (class, Some(event.by().uid)) } else { shared };
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX && !all.contains_key(&own) {
            all.retain(|_, allowance| !allowance.is_spare(now));
        }
        let key = if all.len() < MAX || all.contains_key(&own) { own } else { shared };
        let full = || Allowance { left: BURST, since: now, suppressed: 0 };
        all.entry(key).or_insert_with(full).take(u64::try_from(size).unwrap_or(u64::MAX), now)
    }
}

impl LineClass {
    /// That of `event`; `None` where no user without privilege can cause it at will.
    const fn of(event: &Event) -> Option<Self> {
        match event {
            Event::Refusal(_) | Event::ClaimRefused(_) => Some(Self::Refused),
            Event::Grant(action) | Event::Return(action) | Event::Scrub(action) if action.by.uid != 0 => {
                Some(Self::Done)
            }
            Event::Quarantine(_) | Event::Release(_) => Some(Self::Quarantined),
            _ => None,
        }
    }
}

impl Allowance {
    /// Whether it can be dropped: it is full again, and has no suppressed lines to report.
    fn is_spare(&self, now: Instant) -> bool {
        self.suppressed == 0 && self.at(now) == BURST
    }

    fn at(&self, now: Instant) -> u64 {
        let seconds = now.saturating_duration_since(self.since).as_secs();
        self.left.saturating_add(seconds.saturating_mul(REFILL)).min(BURST)
    }

    fn take(&mut self, size: u64, now: Instant) -> Option<u64> {
        let left = self.at(now);
        let whole = now.saturating_duration_since(self.since).as_secs();
        self.since = self.since.checked_add(Duration::from_secs(whole)).unwrap_or(now);
        self.left = left.saturating_sub(size);
        if left < size {
            (self.left, self.suppressed) = (left, self.suppressed.saturating_add(1));
            return None;
        }
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use egm_address::{Offset, Span};

    use super::*;
    use crate::audit::{Action, Actor, Finding, Refusal, RegionBytes};

    const LINE: usize = 512;
    /// Lines of [`LINE`] bytes that a full allowance permits.
    const LINES: usize = 512;

    fn by(uid: u32) -> Actor {
        Actor { uid, ..Actor::default() }
    }

    fn refusal(uid: u32, region: Option<&str>) -> Event {
        let (region, reason) = (region.map(str::to_owned), "no".to_owned());
        Event::Refusal(Refusal { by: by(uid), region, bytes: None, reason })
    }

    fn place() -> RegionBytes {
        RegionBytes::of("r", Span::new(Offset::new(0), 4096).unwrap())
    }

    fn logged(limits: &Limits, event: &Event, times: usize, now: Instant) -> usize {
        (0..times).filter(|_| limits.allow_at(event, LINE, now).is_some()).count()
    }

    #[test]
    fn refusals_of_a_user_without_end_are_counted_and_leave_grants_and_others_their_lines() {
        let (limits, begun) = (Limits::default(), Instant::now());
        assert_eq!(logged(&limits, &refusal(1, Some("r")), 1000, begun), LINES);
        assert_eq!(limits.allow_at(&refusal(2, Some("r")), LINE, begun), Some(0));
        let second = Duration::from_secs(1);
        assert_eq!(limits.allow_at(&refusal(1, Some("r")), LINE, begun + second), Some(488));
        assert_eq!(limits.allow_at(&refusal(1, Some("r")), LINE, begun + second), None);
        let grant = |uid| Event::Grant(Action::new(by(uid), place(), Duration::ZERO));
        assert_eq!(logged(&limits, &grant(1), 1000, begun), LINES, "grants have a limit of their own");
        assert_eq!(logged(&limits, &grant(0), 10_000, begun), 10_000, "root's have none");
        let finding = || Finding::new(by(1), place(), "");
        assert_eq!(logged(&limits, &Event::Quarantine(finding()), 1000, begun), LINES);
        for event in [Event::Retire(finding()), Event::Unretire(finding()), Event::Mismatch(finding())] {
            assert_eq!(logged(&limits, &event, 1000, begun), 1000);
        }
    }

    #[test]
    fn peers_that_no_rule_names_share_one_allowance() {
        let (limits, now) = (Limits::default(), Instant::now());
        let logged = (0..100_000).filter(|uid| limits.allow_at(&refusal(*uid, None), LINE, now).is_some());
        assert_eq!(logged.count(), LINES);
        assert_eq!(
            limits.allow_at(&refusal(1, Some("r")), LINE, now),
            Some(0),
            "a user with a rule has another"
        );
    }

    #[test]
    fn allowances_that_are_full_again_make_room_for_other_users() {
        let (limits, now) = (Limits::default(), Instant::now());
        for uid in 0..5000 {
            limits.allow_at(&refusal(uid, Some("r")), LINE, now);
        }
        let later = now + Duration::from_secs(1);
        assert_eq!(logged(&limits, &refusal(9000, Some("r")), 1000, later), LINES);
        assert!(limits.0.lock().unwrap().contains_key(&(LineClass::Refused, Some(9000))));
        assert!(limits.0.lock().unwrap().len() <= MAX + 1);
    }

    #[test]
    fn one_user_does_not_fill_the_log_s_files_in_a_day() {
        let (limits, begun) = (Limits::default(), Instant::now());
        let grant = Event::Grant(Action::new(by(1), place(), Duration::ZERO));
        let mut bytes = 0;
        for second in 0..86_400 {
            let now = begun + Duration::from_secs(second);
            for event in [&refusal(1, Some("r")), &grant] {
                while limits.allow_at(event, 8192, now).is_some() {
                    bytes += 8192;
                }
            }
        }
        assert!(bytes < 128 << 20, "{bytes}");
        assert!(bytes > 64 << 20, "{bytes}");
    }
}
