//! The three steps of a root rotation, in which a new root replaces the active one.
//!
//! Each step returns the CA as it is afterwards, and can be repeated without harm. Before the next step, the calling code
//! must check that all peers have received the step before.

use super::{Ca, CaError, RootStage, RotationStep};
use crate::ca::root::Root;

impl Ca {
    /// Returns the state of a rotation: the other root, and its role.
    pub fn other(&self) -> Option<(RootStage, crate::Fingerprint)> {
        let other = self.other.as_ref();
        other.map(|(stage, root)| (*stage, root.fingerprint))
    }

    /// Whether this CA is equal to `previous`, or is `previous` after further steps. If so, nothing is lost when this CA
    /// replaces `previous`. Includes the intermediate for listeners that another CA signs.
    pub(crate) fn is_same_or_newer(&self, previous: &Self) -> bool {
        if !self.listeners.is_same_or_newer(&previous.listeners) {
            return false;
        }
        let (previous_active, previous_other) = (previous.fingerprint(), previous.other());
        let (active, current_other) = (self.fingerprint(), self.other());
        if (active, current_other) == (previous_active, previous_other) {
            return true;
        }
        let newest = match previous_other {
            Some((RootStage::Prepared, next)) => next,
            _ => previous_active,
        };
        match current_other {
            Some((RootStage::Retiring, retiring)) => {
                retiring == newest || (active == newest && retiring == previous_active)
            }
            _ => active == newest,
        }
    }

    /// Adds a new root beside the one that signs. It is trusted and signs nothing yet.
    pub fn prepare(mut self) -> Result<(Self, RotationStep), CaError> {
        match self.other {
            Some((RootStage::Retiring, _)) => Err(CaError::Order(
                "the old root of the last rotation is still trusted: run `causeway ca rotate retire` first",
            )),
            Some(_) => Ok((self, RotationStep::Unchanged)),
            None => {
                let not_before = self.active.signer.parsed.not_before;
                let mut next = Root::create_valid_from(self.trust_domain(), not_before)?;
                next.cross_certificate = Some(self.active.cross_sign(&next)?);
                self.other = Some((RootStage::Prepared, next));
                Ok((self, RotationStep::Applied))
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
                let old_root = std::mem::replace(&mut self.active, next);
                self.other = Some((RootStage::Retiring, old_root));
                Ok((self, RotationStep::Applied))
            }
            Some(_) => Ok((self, RotationStep::Unchanged)),
        }
    }

    /// Removes the root before the active one, which is then not trusted any more.
    pub fn retire(mut self) -> Result<(Self, RotationStep), CaError> {
        match self.other {
            None => Ok((self, RotationStep::Unchanged)),
            Some((RootStage::Retiring, _)) => {
                self.other = None;
                self.active.cross_certificate = None;
                Ok((self, RotationStep::Applied))
            }
            Some(_) => Err(CaError::Order(
                "the prepared root does not sign certificates yet: run `causeway ca rotate activate` first",
            )),
        }
    }
}
