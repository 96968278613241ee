//! The three steps of a root rotation, in which a new root replaces the active one.
//!
//! Each step returns the CA as it is afterwards, and can be repeated without harm. The code that makes the next step must find
//! out whether all peers have learned of the step before.

use super::{Ca, CaError, RootStage, RotationStep};
use crate::ca::root::Root;

impl Ca {
    /// Returns the state of a rotation: the other root, and its role.
    pub fn other(&self) -> Option<(RootStage, crate::Fingerprint)> {
        let other = self.other.as_ref();
        other.map(|(stage, root)| (*stage, root.fingerprint))
    }

    /// Whether this is what the other CA is, or what its next steps make of it: then nothing is lost where this takes the place
    /// of that. The same holds for the intermediate of
    /// listeners that another CA signs.
    pub(crate) fn goes_on_from(&self, before: &Self) -> bool {
        if !self.listeners.goes_on_from(&before.listeners) {
            return false;
        }
        let (signed, other) = (before.fingerprint(), before.other());
        let (signs, comes_or_goes) = (self.fingerprint(), self.other());
        if (signs, comes_or_goes) == (signed, other) {
            return true;
        }
        let newest = match other {
            Some((RootStage::Prepared, next)) => next,
            _ => signed,
        };
        match comes_or_goes {
            Some((RootStage::Retiring, goes)) => {
                goes == newest || (signs == newest && goes == signed)
            }
            _ => signs == newest,
        }
    }

    /// A new root beside the one that signs: trusted, and signing nothing yet.
    pub fn prepare(mut self) -> Result<(Self, RotationStep), CaError> {
        match self.other {
            Some((RootStage::Retiring, _)) => Err(CaError::Order(
                "the old root of the last rotation is still trusted: run `causeway ca rotate retire` first",
            )),
            Some(_) => Ok((self, RotationStep::Standing)),
            None => {
                let begins = self.active.own.facts.not_before;
                let mut next = Root::create_since(self.trust_domain(), begins)?;
                next.crossed = Some(self.active.cross(&next)?);
                self.other = Some((RootStage::Prepared, next));
                Ok((self, RotationStep::Made))
            }
        }
    }

    /// Lets the new root sign everything. The root before it is still trusted.
    pub fn activate(mut self) -> Result<(Self, RotationStep), CaError> {
        match self.other {
            None => Err(CaError::Order(
                "no new root is prepared: run `causeway ca rotate prepare` first",
            )),
            Some((RootStage::Prepared, next)) => {
                let before = std::mem::replace(&mut self.active, next);
                self.other = Some((RootStage::Retiring, before));
                Ok((self, RotationStep::Made))
            }
            Some(_) => Ok((self, RotationStep::Standing)),
        }
    }

    /// The root before is trusted no more.
    pub fn retire(mut self) -> Result<(Self, RotationStep), CaError> {
        match self.other {
            None => Ok((self, RotationStep::Standing)),
            Some((RootStage::Retiring, _)) => {
                self.other = None;
                self.active.crossed = None;
                Ok((self, RotationStep::Made))
            }
            Some(_) => Err(CaError::Order(
                "the prepared root does not sign certificates yet: run `causeway ca rotate activate` first",
            )),
        }
    }
}
