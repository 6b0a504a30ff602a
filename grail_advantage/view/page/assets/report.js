"use strict";
// The page of a run. What comes from a model is only ever set as textContent.
// Each of the other files is a part of it, which takes from the parts before it by the shared `r`, calls those after it by
// `r.name`, and leaves there what others use. start.js runs them in order.
const parts = [];
