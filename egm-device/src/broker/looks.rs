//! What waits until the regions have been looked at: the ledger may be locked, and the loop waits for nobody.

use super::session::Key;
use super::wire::Request;

/// What is decided by what the regions have.
pub(super) enum Ask {
    /// A client's.
    Request(Key, Request),
    /// A slice for which there was no place.
    Short(Key),
}

/// One look at a time, for all that was asked before it began: nobody makes the ledger work by asking often.
#[derive(Default)]
pub(super) struct Looks {
    asked: Vec<Ask>,
    /// What the look that goes on is for.
    begun: Option<Vec<Ask>>,
    /// Whether a look is to follow.
    due: bool,
    /// Whether slices came or went since the look began: it saw some of it, perhaps.
    stale: bool,
}

impl Looks {
    /// `ask` is decided at the next look.
    pub(super) fn ask(&mut self, ask: Ask) {
        self.asked.push(ask);
        self.due = true;
    }

    /// Those who wait are served at the next look, if any do.
    pub(super) const fn serve(&mut self, any: bool) {
        self.due |= any;
    }

    /// Slices came or went.
    pub(super) const fn changed(&mut self) {
        self.stale = true;
    }

    /// Whether a look is to begin now.
    pub(super) fn begin(&mut self) -> bool {
        let begins = self.due && self.begun.is_none();
        if begins {
            self.begun = Some(std::mem::take(&mut self.asked));
            (self.due, self.stale) = (false, false);
        }
        begins
    }

    /// A look is over: what it decides; `None` when another has to.
    pub(super) fn over(&mut self) -> Option<Vec<Ask>> {
        let asks = self.begun.take()?;
        if self.stale {
            self.asked.splice(0..0, asks);
            self.due = true;
            return None;
        }
        Some(asks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_decided_by_a_look_that_began_and_ended_between_two_changes() {
        let mut looks = Looks::default();
        assert!(!looks.begin());
        looks.ask(Ask::Short(1));
        assert!(looks.begin());
        looks.ask(Ask::Short(2));
        assert!(!looks.begin(), "one at a time");
        looks.changed();
        assert!(looks.over().is_none() && looks.begin());
        let asks = looks.over().unwrap();
        assert!(matches!(asks[..], [Ask::Short(1), Ask::Short(2)]));
        assert!(!looks.begin());
    }
}
